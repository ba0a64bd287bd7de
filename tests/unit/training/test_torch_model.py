"""All forms of the torch model are one function, and it is the published one."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from research.bench.model.recurrence import Recurrence
from srm.engine.config import Mixer, ModelConfig
from srm.engine.weights.random_model import random_tensors
from srm.engine.weights.tensors import is_scalar
from srm.training.baselines.transformer import Transformer, TransformerShape
from srm.training.huggingface.mixers_srm import TokenMixer
from srm.training.huggingface.units_srm import Places, Units, split_documents
from srm.training.model import SRM, LanguageModel
from srm.training.precision import autocast
from srm.training.settings import Precision
from tests.kit.engines.numpy_runner import TINY
from tests.kit.models.variants import configs, mixed_tokens

TOLERANCE = 1e-9
"""Of float64, relative to the largest logit."""

variants = settings(max_examples=60, deadline=None)


def randomized(config: ModelConfig, seed: int = 0) -> SRM:
    """In float64, scalars far from their initial values, decays out of their range too."""
    torch.manual_seed(seed)
    model = SRM(config).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("decay_value"):
                parameter.uniform_(0.85, 1.05)
            elif is_scalar(name) or name.endswith("bias"):
                parameter.normal_()
    return model


def random_ids(config: ModelConfig, seed: int, rows: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, config.vocab_size, (rows, config.n_ctx), generator=generator)


def recurrent(model: SRM, ids: Tensor) -> Tensor:
    state, logits = model.empty_state(len(ids)), []
    for position in range(ids.shape[1]):
        at_position, state = model.step(ids[:, position], state, position)
        logits.append(at_position)
    return torch.stack(logits, dim=1)


def gradients(model: SRM, logits: Tensor) -> dict[str, Tensor]:
    """Of every parameter, of the mean square of logits of this model."""
    values = torch.autograd.grad(logits.square().mean(), list(model.parameters()))
    return dict(zip(dict(model.named_parameters()), values, strict=True))


def error(tensor: Tensor, expected: Tensor) -> float:
    return float(((tensor - expected).abs().max() / expected.abs().max()).detach())


@variants
@given(config=configs(max_n_ctx=25), seed=st.integers(0, 99), chunk=st.integers(2, 9))
def test_all_forms_have_the_same_logits_and_gradients(
    config: ModelConfig, seed: int, chunk: int
) -> None:
    model, ids = randomized(config, seed), random_ids(config, seed)
    published = model(ids, chunk=config.n_ctx)
    expected = gradients(model, published)
    for logits in (recurrent(model, ids), model(ids, chunk=chunk)):
        assert error(logits, published) <= TOLERANCE
        for name, gradient in gradients(model, logits).items():
            largest = float(expected[name].abs().max())
            assert (gradient - expected[name]).abs().max() <= TOLERANCE * max(1, largest), name


@variants
@given(config=configs(max_n_ctx=25), seed=st.integers(0, 99), chunk=st.integers(2, 9))
def test_documents_of_a_row_are_computed_as_if_each_stood_alone(
    config: ModelConfig, seed: int, chunk: int
) -> None:
    """In the chunked form and the published one, gradients too; alone also token by token."""
    model, ids = randomized(config, seed), random_ids(config, seed)
    alone = []
    for row in ids:
        begins = [0, *(i for i in range(1, config.n_ctx) if row[i] == 0), config.n_ctx]
        pieces = [row[None, begin:end] for begin, end in pairwise(begins)]
        for form in (model, lambda piece: recurrent(model, piece)):
            alone.append(torch.cat([form(piece) for piece in pieces], 1))
    expected, token_by_token = (torch.cat(alone[form::2]) for form in (0, 1))
    assert error(token_by_token, expected) < TOLERANCE
    wanted = gradients(model, expected)
    model.separator = 0
    for length in (chunk, 256):
        logits = model(ids, chunk=length)
        assert error(logits, expected) < TOLERANCE
        for name, gradient in gradients(model, logits).items():
            largest = float(wanted[name].abs().max())
            assert (gradient - wanted[name]).abs().max() <= TOLERANCE * max(1, largest), name


def measure_kept(model: Callable[..., Tensor], length: int, **form: int) -> int:
    """Bytes that are kept for the gradients."""
    total = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal total
        total += tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(torch.zeros(1, length, dtype=torch.int64), **form)
    return total


def test_memory_of_training_is_linear_in_length() -> None:
    """Where the published form keeps length² numbers a head."""
    model = SRM(ModelConfig(d_model=16, num_layers=1, num_heads=2, n_ctx=4096, vocab_size=31))
    linear, square = measure_kept(model, 4096), measure_kept(model, 2048, chunk=4096)
    assert linear < 2.2 * measure_kept(model, 2048)
    assert measure_kept(model, 4096, chunk=4096) > 3.5 * square > 3 * linear


@pytest.mark.parametrize("kind", ["SRM", "Transformer"])
def test_a_block_computed_again_keeps_its_inputs_alone(kind: str) -> None:
    """A block more keeps a tenth of the bytes or fewer."""
    sizes: dict[bool, list[int]] = {False: [], True: []}
    for layers in (1, 3):
        if kind == "SRM":
            model: LanguageModel = SRM(ModelConfig(64, layers, 2, 64, 31))
        else:
            model = Transformer(TransformerShape(64, layers, 2, 256, 31))
        measure_kept(model, 64)  # what is tried at the first time is not counted
        for model.checkpoint_activations, counts in sizes.items():
            counts.append(measure_kept(model, 64))
    shallow, deep = (np.array(by_depth) for by_depth in zip(*sizes.values(), strict=True))
    stored, recomputed = deep - shallow
    assert 0 < recomputed < 0.1 * stored


in_chunks = given(
    config=configs(max_n_ctx=25),
    seed=st.integers(0, 99),
    chunk=st.integers(2, 9),
    precision=st.sampled_from(["float32", "bfloat16"]),
    separator=st.sampled_from([None, 0]),
)


@variants
@in_chunks
def test_blocks_computed_again_have_the_same_bits(
    config: ModelConfig, seed: int, chunk: int, precision: Precision, separator: int | None
) -> None:
    model, ids = randomized(config, seed).float(), random_ids(config, seed)
    model.separator, results = separator, []
    for model.checkpoint_activations in (False, True):
        with autocast(precision, ids.device):
            logits = model(ids, chunk)
        results.append([logits, *gradients(model, logits.float()).values()])
    assert all(map(torch.equal, *results))


def test_compiled_blocks_are_computed_again_too() -> None:
    """Traced, and divided into passes forward and backward, but not made machine code."""
    model = SRM(ModelConfig(16, 1, 2, 128, 31))
    model.separator, ids, sizes, results = 0, random_ids(model.config, 0, rows=1), [], []
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for model.checkpoint_activations in (False, True):
        sizes.append(measure_kept(compiled, 128))
        logits = compiled(ids)
        results.append([logits, *gradients(model, logits).values()])
    assert sizes[1] < 0.7 * sizes[0] and all(map(torch.equal, *results))


def block_by_block(model: SRM, ids: Tensor, places: Places) -> Tensor:
    """Logits where each block makes its mixer's matrices of its own parameters alone."""
    x = model.input_layer(ids)
    for block in model.mixer_blocks:
        x, _ = block(x, places)
    return model.output_layer(x)  # type: ignore[no-any-return]


@variants
@in_chunks
def test_units_placed_at_once_are_those_of_each_block(
    config: ModelConfig, seed: int, chunk: int, precision: Precision, separator: int | None
) -> None:
    """The same bits of logits; gradients within rounding, whose sums are made in another order."""
    model, ids = randomized(config, seed).float(), random_ids(config, seed)
    places = Places(slice(config.n_ctx), chunk=chunk)
    if separator is not None:
        model.separator, places = separator, split_documents(ids == separator, chunk)
    with autocast(precision, ids.device):
        result, expected = model(ids, chunk), block_by_block(model, ids, places)
    assert torch.equal(result, expected)
    wanted, tolerance = gradients(model, expected), 1e-5 if precision == "float32" else 2e-2
    for name, gradient in gradients(model, result).items():
        largest = float(wanted[name].abs().max())
        assert (gradient - wanted[name]).abs().max() <= tolerance * largest, name


class Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations, but for those that make another view of a tensor."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = func._schema
        is_view = any(returned.alias_info for returned in schema.returns) and not schema.is_mutable
        self.count += not is_view
        return func(*args, **(kwargs or {}))


def launches_per_block(make: Callable[[int], LanguageModel]) -> float:
    """Operations of forward and backward passes that a block adds, in bfloat16."""
    counts: list[int] = []
    for blocks in (1, 3):
        model, ids = make(blocks), torch.zeros(2, 512, dtype=torch.int64)
        with autocast("bfloat16", ids.device):
            model(ids)  # what is tried or kept at the first time is not counted
        with Launches() as launches:
            with autocast("bfloat16", ids.device):
                logits = model(ids)
            logits.float().square().mean().backward()
        counts.append(launches.count)
    return (counts[1] - counts[0]) / 2


def test_a_block_launches_no_more_than_a_transformers() -> None:
    """Two chunks, whose sums are carried; the mixers' matrices are made for all blocks at once."""
    srm = launches_per_block(lambda blocks: SRM(ModelConfig(16, blocks, 4, 512, 31)))
    of_transformer = launches_per_block(
        lambda blocks: Transformer(TransformerShape(16, blocks, 4, 32, 31))
    )
    assert srm <= 0.75 * of_transformer, (srm, of_transformer)


def check_mixer(model: SRM, x: np.ndarray[Any, np.dtype[np.float64]]) -> None:
    """The first token mixer gives for x [length, d] the sum that it is published as."""
    mixer = model.mixer_blocks[0].token_mixing_layer
    assert isinstance(mixer, TokenMixer)
    tensors = {name: value.detach().numpy() for name, value in mixer.named_parameters()}
    expected = torch.from_numpy(mixed_tokens(model.config, tensors, x))
    with torch.no_grad():
        mixed, _ = mixer(torch.from_numpy(x)[None], Places(slice(len(x))))
        assert error(mixed[0], expected) <= TOLERANCE


@variants
@given(config=configs(), seed=st.integers(0, 99))
def test_a_mixer_is_the_sum_it_is_published_as(config: ModelConfig, seed: int) -> None:
    x = np.random.default_rng(seed).standard_normal((config.n_ctx, config.d_model))
    check_mixer(randomized(config, seed), x)


LENGTHS = (64, 511, 512, 850, 1023, 1024, 1536, 2048)
MIXERS = ("mixed", "combined", "parallel", "kernel", "diagonal")
FAST = {("mixed", 850), ("kernel", 850), *((mixer, 64) for mixer in MIXERS)}


def published_length(mixer: Mixer, n_ctx: int) -> ModelConfig:
    """With the decay constant of the published code, and 1 where that code has none."""
    constant = {"kernel": n_ctx // 256, "diagonal": 1}.get(mixer, n_ctx // 512)
    is_headless = mixer == "kernel"
    return ModelConfig(
        8, 1, 1 if is_headless else 2, n_ctx, 31, use_projections=not is_headless, mixer=mixer,
        decay_constant=max(1, constant), kernel_size=3 if is_headless else 1,
    )  # fmt: skip


def set_decays(model: SRM, decay: float) -> SRM:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("decay_value"):
                parameter.fill_(decay)
    return model


def at_decay(config: ModelConfig, decay: float) -> SRM:
    """A model with α as published and every decay the same."""
    torch.manual_seed(0)
    model = SRM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_scalar(name) and name.endswith("weight"):
                parameter.normal_(std=(2 / config.n_ctx) ** 0.5)
    return set_decays(model, decay)


def stages(mixer: Any) -> list[Any]:
    """The parts of the mixer `expanded`, two a head."""
    return [
        part
        for head in mixer.mixer_heads
        for part in (head.get_submodule("0"), head.get_submodule("2"))
    ]


@pytest.mark.parametrize("decay", [False, True])
@pytest.mark.parametrize("mixer", get_args(Mixer))
def test_a_new_mixer_sums_tokens_to_the_deviation_of_one(mixer: Mixer, decay: bool) -> None:
    heads = 1 if mixer in {"row", "column", "kernel"} else 6
    has_decay = decay and mixer not in {"column_heads", "row", "column", "expanded"}
    kernel = 3 if mixer == "kernel" else 1
    variant: Any = {"use_projections": heads > 1, "decay": has_decay, "kernel_size": kernel}
    config = ModelConfig(600, 1, heads, 300, 31, **variant, mixer=mixer)
    new: Any = TokenMixer(config).double()
    if mixer == "diagonal":  # whose newest token has a weight of its own
        for head in new.mixer_heads:
            head.diag_weight.data.zero_()
    tokens = torch.randn(1, 300, heads, 600 // heads, generator=torch.Generator().manual_seed(0))
    if mixer == "expanded":  # two sums, with SiLU between them
        assert all((2 / 3) ** 2 < part.weight.square().sum() < (3 / 2) ** 2 for part in stages(new))
        return
    sums = new.mix(tokens.double(), Units(Places(slice(300)), None, None))[0, -1].detach()
    for of_head in sums:  # of 100 channels
        assert 2 / 3 < float(of_head.std()) < 3 / 2


def test_layers_begin_at_deviations_of_their_widths() -> None:
    torch.manual_seed(0)
    model = SRM(ModelConfig(256, 3, 4, 16, 500))
    residual = 6**-0.5
    for name, deviation in {
        "input_layer": 1,
        "output_layer": 1 / 16,
        "mixer_blocks.2.channel_mixing_layer.0": 1 / 16,
        "mixer_blocks.2.channel_mixing_layer.2": residual / 32,
        "mixer_blocks.2.token_mixing_layer.proj_head.3": 1 / 16,
        "mixer_blocks.2.token_mixing_layer.out_proj": residual / 16,
    }.items():
        layer: Any = model.get_submodule(name)
        assert float(layer.weight.detach().std()) == pytest.approx(deviation, rel=0.03)
        assert getattr(layer, "bias", None) is None or not layer.bias.any()


@pytest.mark.parametrize(
    ("mixer", "n_ctx"),
    [
        pytest.param(mixer, length, marks=[pytest.mark.slow] * ((mixer, length) not in FAST))
        for mixer in MIXERS
        for length in LENGTHS
    ],
)
def test_lengths_of_published_models(mixer: Mixer, n_ctx: int) -> None:
    """Both forms are the published sums, in float32 too, and gradients are finite everywhere.

    At both ends of the decay's range: there the published code's powers overflow from 850 on.
    """
    config = published_length(mixer, n_ctx)
    for decay in (0.9, 1.0):
        model, ids = set_decays(randomized(config), decay), random_ids(config, seed=1, rows=1)
        check_mixer(model, np.random.default_rng(2).standard_normal((n_ctx, config.d_model)))
        with torch.no_grad():
            assert error(recurrent(model, ids), model(ids)) <= TOLERANCE
            rounded = model.float()
            exact = rounded.double()(ids)
            result = recurrent(rounded.float(), ids), rounded(ids)
            assert all(error(item.double(), exact) <= 1e-5 for item in result)
        trained = at_decay(config, decay)
        for name, gradient in gradients(trained, trained(ids)).items():
            assert torch.isfinite(gradient).all(), name
            if name.endswith("decay_value"):
                assert (gradient.flatten()[-1] != 0).all(), "the ends belong to the range"


@pytest.mark.parametrize("decay", [0.9, pytest.param(1.0, marks=pytest.mark.slow)])
def test_gradients_through_the_recurrent_form_are_finite(decay: float) -> None:
    """At the length where the published parallel form has none for the smaller decay."""
    config = published_length("mixed", 850)
    model, ids = at_decay(config, decay), random_ids(config, seed=1, rows=1)
    parallel = gradients(model, model(ids))
    for name, gradient in gradients(model, recurrent(model, ids)).items():
        assert torch.isfinite(gradient).all()
        assert error(gradient, parallel[name]) <= 1e-3, name


LENGTH = 12
"""Tokens that the recurrence is given, which the engine is measured against."""


HEADLESS = {"num_heads": 1, "use_projections": False}
CONFIGS = [
    msgspec.structs.replace(TINY, mixer=mixer, decay=decay, **more)
    for mixer, decay, more in (
        ("mixed", True, {}),
        ("parallel", True, {}),
        ("column_heads", False, {}),
        ("row", False, HEADLESS),
    )
]


def random_model(config: ModelConfig) -> SRM:
    model, tensors = SRM(config), random_tensors(config)
    model.load_state_dict({name: torch.from_numpy(value) for name, value in tensors.items()})
    return model


def recurrence_of(config: ModelConfig, dtype: torch.dtype = torch.float32) -> Recurrence:
    return Recurrence(random_model(config), dtype)


def logits_of(model: Recurrence, ids: torch.Tensor) -> torch.Tensor:
    """ids [batch, LENGTH] token by token: [batch, LENGTH, vocab]."""
    state, positions = model.empty_state(len(ids)), torch.arange(LENGTH)[:, None]
    steps = [model.logits(ids[:, i], state, positions[i]) for i in range(LENGTH)]
    return torch.stack(steps, dim=1).float()


@torch.inference_mode()
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.mixer)
def test_the_recurrence_gives_the_logits_of_the_parallel_form(config: ModelConfig) -> None:
    ids = torch.randint(config.vocab_size, (3, LENGTH), generator=torch.Generator().manual_seed(0))
    expected = random_model(config)(ids)
    result = logits_of(recurrence_of(config), ids)
    assert (result - expected).abs().max() < 1e-5 * expected.abs().max()
    rounded = logits_of(recurrence_of(config, torch.bfloat16), ids)
    assert (rounded - expected).abs().max() < 5e-2 * expected.abs().max()
    assert not torch.equal(rounded, result)


@torch.inference_mode()
def test_the_recurrence_samples_from_its_softmax() -> None:
    model, batch = recurrence_of(TINY), 20_000
    torch.manual_seed(0)
    ids, at = torch.full((batch,), 7), torch.zeros(1, dtype=torch.int64)
    drawn = model(ids, model.empty_state(batch), at)
    expected = model.logits(ids[:1], model.empty_state(1), at)[0].softmax(-1)
    frequency = drawn.bincount(minlength=32) / batch
    assert ((frequency - expected).abs() < 5 * (expected / batch).sqrt() + 1e-4).all()
