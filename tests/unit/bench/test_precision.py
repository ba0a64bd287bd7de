"""The roundings of `srm bench precision`, and the measures that it reports."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import get_args

import msgspec
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from bench.model.divergence import Oracle, octaves
from bench.model.plots import SHOWN_CASES, draw_precision
from bench.model.precision import (
    ANSWERING,
    CASES,
    answers,
    measure_model,
    problem_tokens,
    random_tokens,
    sampled_tokens,
)
from bench.model.precision_tables import markdown
from bench.model.rounded import Precision, RoundedModel, Unit, rounded
from engine.config import DEMO_MODEL, Mixer, ModelConfig
from engine.steps.batch import F32
from engine.weights.checkpoint import load_checkpoint
from engine.weights.random_model import random_tensors, write_random_model
from engine.weights.tensors import is_scalar
from engine.weights.weights import MixerUnit, Weights, fold
from training.checkpoint import load_model
from training.data import BEGIN_ID, END_ID
from training.model import SRM
from training.tasks import problems

BF16, FP16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
LENGTH = 48


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Sharing matrices this small out to threads takes longer than multiplying them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def shape_of(mixer: Mixer, n_ctx: int = LENGTH) -> ModelConfig:
    is_headless = mixer in {"row", "column", "kernel"}
    has_decay = mixer in {"mixed", "parallel", "combined", "kernel", "diagonal"}
    return ModelConfig(
        d_model=32,
        num_layers=2,
        num_heads=1 if is_headless else 4,
        n_ctx=n_ctx,
        vocab_size=101,
        mixer=mixer,
        use_projections=not is_headless,
        decay=has_decay,
        decay_constant=2 if has_decay else 1,
        kernel_size=3 if mixer == "kernel" else 1,
    )


@cache
def random_weights(mixer: Mixer, n_ctx: int = LENGTH) -> Weights:
    shape = shape_of(mixer, n_ctx)
    return fold(shape, random_tensors(shape), "")


@cache
def oracle(mixer: Mixer, n_ctx: int = LENGTH) -> tuple[Tensor, Oracle]:
    """Tokens of two sequences, and the float64 model's logits for them."""
    shape = shape_of(mixer, n_ctx)
    model = SRM(shape)
    tensors = random_tensors(shape)
    model.load_state_dict({name: torch.from_numpy(value) for name, value in tensors.items()})
    ids = random_tokens(shape, 2, seed=1)
    return ids, Oracle(model.double()(ids.T).transpose(0, 1))


def logits_at(precision: Precision, mixer: Mixer = "combined") -> Tensor:
    model = RoundedModel(random_weights(mixer), precision)
    return model.run(oracle(mixer)[0], model.empty_state(2))


def rms_error(precision: Precision, mixer: Mixer = "combined") -> float:
    return oracle(mixer)[1].compare(logits_at(precision, mixer)).summary()["rms_error"]


@pytest.mark.parametrize(
    ("mixer", "n_ctx"), [*((mixer, LENGTH) for mixer in get_args(Mixer)), ("mixed", 1024)]
)
def test_in_float32_every_position_is_the_oracles(mixer: Mixer, n_ctx: int) -> None:
    ids, exact = oracle(mixer, n_ctx)
    model = RoundedModel(random_weights(mixer, n_ctx), Precision())
    divergence = exact.compare(model.run(ids, model.empty_state(2)))
    assert divergence.largest.max() <= 1e-5
    assert divergence.kl.max() <= 1e-9


def test_positions_can_be_fed_in_pieces() -> None:
    model, ids = RoundedModel(random_weights("kernel"), Precision()), oracle("kernel")[0]
    whole, pieces = model.empty_state(2), model.empty_state(2)
    logits = model.run(ids, whole)
    parts = [model.run(ids[:1], pieces), model.run(ids[1:30], pieces, 1)]
    parts.append(model.run(ids[30:], pieces, 30))
    torch.testing.assert_close(torch.cat(parts), logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(pieces, whole, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", [field.name for field in fields(Precision)])
def test_every_kind_of_tensor_is_rounded(kind: str) -> None:
    """bfloat16 has 8 significant bits and float16 has 11: eight times the error, about."""
    bf16 = rms_error(replace(Precision(), **{kind: BF16}))
    fp16 = rms_error(replace(Precision(), **{kind: FP16}))
    assert 1e-4 < bf16 < 2e-2
    assert 4 < bf16 / fp16 < 16


def test_units_are_what_the_first_of_two_hands_on_and_nothing_else() -> None:
    one_unit = Precision(units=BF16)
    assert logits_at(one_unit, "mixed").equal(logits_at(Precision(), "mixed"))
    for mixer in ("combined", "expanded", "kernel"):
        assert rms_error(one_unit, mixer) > 3e-5


def test_weights_that_are_stored_in_bfloat16_lose_nothing_and_scalars_stay_float32() -> None:
    shape = shape_of("diagonal")
    tensors = {
        name: value if is_scalar(name) else rounded(torch.from_numpy(value), BF16).numpy()
        for name, value in random_tensors(shape).items()
    }
    weights, ids = fold(shape, tensors, ""), oracle("diagonal")[0]
    models = [RoundedModel(weights, Precision(weights=dtype)) for dtype in (FLOAT32, BF16)]
    wide, narrow = (model.run(ids, model.empty_state(2)) for model in models)
    assert wide.equal(narrow)


def sum_of_ones(dtype: torch.dtype, count: int) -> tuple[Tensor, Tensor]:
    """Outputs and last state of a unit that only adds, on ones."""
    ones = np.ones((1, count), np.float32)
    unit = MixerUnit(ones, ones, 0 * ones, np.array([[1], [0]], np.float32))
    state = torch.zeros(1, 1)
    return Unit(unit, width=1).run(torch.ones(count, 1, 1), state, 0, dtype), state


@pytest.mark.parametrize(("dtype", "largest"), [(BF16, 256), (FP16, 2048)])
def test_a_narrow_state_stands_still_where_a_term_is_half_its_ulp(
    dtype: torch.dtype, largest: int
) -> None:
    """Rounded between tokens, while a token's output comes from the sum that is not."""
    y, state = sum_of_ones(dtype, largest + 50)
    assert state.item() == largest
    assert y.flatten()[: largest + 1].equal(torch.arange(1, largest + 2).float())
    assert y[-1].item() == largest + 1
    assert sum_of_ones(FLOAT32, largest + 50)[1].item() == largest + 50


def test_the_rest_of_the_decay_is_not_lost() -> None:
    exact, count = 0.9995**0.25, 2048
    decay = np.float32(exact)
    ones = np.ones((1, count), np.float32)
    rest = np.float32(exact - float(decay))
    unit = MixerUnit(ones, ones, 0 * ones, np.array([[decay], [rest]], np.float32))
    y = Unit(unit, width=1).run(torch.ones(count, 1, 1), torch.zeros(1, 1), 0, FLOAT32)
    expected = (1 - exact**count) / (1 - exact)
    assert y[-1].item() == pytest.approx(expected, rel=5e-6)


@pytest.mark.parametrize("case", ["products bf16", "step bf16"])
def test_the_first_norm_and_product_by_hand(case: str) -> None:
    """A layer without a token mixer to speak of: α = β = 0, so logits are the channel mixing's."""
    shape = msgspec.structs.replace(shape_of("mixed"), num_layers=1)
    tensors = random_tensors(shape)
    for name, value in tensors.items():
        if is_scalar(name) or ".out_proj." in name:
            value[...] = 0
    weights, p = fold(shape, tensors, ""), CASES[case]
    layer, ids = weights.layers[0], torch.tensor([[5], [7]])

    def w(value: F32) -> Tensor:
        return rounded(torch.from_numpy(value), p.weights)

    x = rounded(w(weights.embedding)[ids[:, 0]], p.residual)
    norm = torch.nn.functional.layer_norm(
        x, [32], w(layer.channel_norm_weight), w(layer.channel_norm_bias)
    )
    norm = rounded(rounded(norm, p.activations), p.operands)
    up = rounded(
        rounded(norm @ w(layer.up_weight), p.activations) + w(layer.up_bias), p.activations
    )
    inner = rounded(rounded(up * torch.sigmoid(up), p.activations), p.operands)
    down = rounded(inner @ w(layer.down_weight), p.activations) + w(layer.down_bias)
    x = rounded(x + rounded(down, p.activations), p.residual)
    expected = rounded(rounded(x, p.operands) @ w(weights.head), p.logits)
    model = RoundedModel(weights, p)
    logits = model.run(ids, model.empty_state(1))[:, 0]
    torch.testing.assert_close(logits, expected, atol=0, rtol=1e-6)
    exact = RoundedModel(weights, Precision())
    assert not torch.allclose(exact.run(ids, exact.empty_state(1))[:, 0], expected, rtol=1e-4)


def test_logits_and_states_hold_values_of_their_dtype() -> None:
    model = RoundedModel(random_weights("mixed"), CASES["step bf16, state fp16"])
    state = model.empty_state(2)
    logits = model.run(oracle("mixed")[0], state)
    assert logits.equal(rounded(logits, BF16))
    assert state.equal(rounded(state, FP16)) and not state.equal(rounded(state, BF16))
    wide = logits_at(CASES["step bf16, logits f32"], "mixed")
    assert not wide.equal(rounded(wide, BF16))


def test_divergence_by_hand() -> None:
    exact = torch.tensor([[[math.log(3.0), 0.0]]], dtype=torch.float64)
    found = Oracle(exact).compare(torch.zeros(1, 1, 2))
    assert found.kl.item() == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5))
    assert found.largest.item() == pytest.approx(1)
    assert found.square.item() == pytest.approx(0.5)
    assert found.agrees.item(), "of equal logits the first counts"
    assert not Oracle(-exact).compare(torch.zeros(1, 1, 2)).agrees.item()


def test_kl_is_never_negative_and_equal_logits_do_not_diverge() -> None:
    generator = torch.Generator().manual_seed(3)
    exact = torch.randn(64, 4, 300, dtype=torch.float64, generator=generator)
    for scale in (0, 1e-9, 1e-3, 1):
        noise = scale * torch.randn(exact.shape, generator=generator)
        assert Oracle(exact).compare((exact + noise).float()).kl.min() >= 0
    same = exact.float()
    assert Oracle(same.double()).compare(same).summary() == {
        **dict.fromkeys(("max_error", "rms_error", "kl_mean", "kl_p99"), 0.0),
        "greedy_agreement": 1.0,
    }


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (1, [(1, 1)]),
        (2, [(1, 1), (2, 2)]),
        (5, [(1, 1), (2, 2), (3, 4), (5, 5)]),
        (8, [(1, 1), (2, 2), (3, 4), (5, 8)]),
    ],
)
def test_octaves_cover_every_position_once(length: int, expected: list[tuple[int, int]]) -> None:
    assert list(octaves(length)) == expected


def test_the_record_has_every_case_and_the_tables_show_it(tmp_path: Path) -> None:
    write_random_model(tmp_path, shape_of("combined"))
    model = measure_model("small", tmp_path, oracle("combined")[0])
    assert [found["case"] for found in model["cases"]] == list(CASES)
    assert model["cases"][0]["max_error"] < 1e-5 < model["cases"][1]["max_error"]
    assert model["matrices_stored_as"] == "F32"
    assert model["largest_activation"] > 1 and model["largest_logit"] > 0
    assert set(SHOWN_CASES) | set(ANSWERING) <= set(CASES)
    assert len(set(CASES.values())) == len(CASES), "no two cases are one"
    model["cases"][0] |= {"right_answers": 0.625, "same_answers": 1.0}
    cases = {"float32": {"weights": "float32"}, "weights bf16": {"weights": "bfloat16"}}
    lines = markdown({"cases": cases, "models": [model]})
    text = "\n".join(lines)
    assert "2 × 48 tokens" in text and "| weights bf16 | bfloat16 |" in text
    assert "| 33–48 |" in text and "| 62.5% | 100.0% |" in text
    for case in CASES:
        assert text.count(f"\n| {case} |") >= 3
    (panel,) = draw_precision({"models": [model]}).axes
    assert {line.get_label() for line in panel.get_lines()} == set(SHOWN_CASES)


def test_greedy_answers_are_the_torch_models() -> None:
    weights, model = load_checkpoint(DEMO_MODEL), load_model(DEMO_MODEL)
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    drawn = list(islice(problems("held-out", 5), 2))
    found = answers(RoundedModel(weights, Precision()), weights.config, tokenizer, drawn)
    for problem, text in zip(drawn, found, strict=True):
        ids = tokenizer.encode(problem.prompt).ids
        given, state = len(ids), model.empty_state(1)
        for position in range(given + 96):
            logits, state = model.step(torch.tensor(ids[position : position + 1]), state, position)
            if position + 1 >= given:
                ids.append(int(logits.argmax()))
            if ids[-1] == END_ID:
                break
        assert text == tokenizer.decode(ids[given:])
        assert "####" in text


def test_what_is_fed() -> None:
    """Of the demo model with a shorter context, which the same weights allow."""
    weights = load_checkpoint(DEMO_MODEL)
    shape = msgspec.structs.replace(weights.config, n_ctx=64)
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    text = problem_tokens(shape, tokenizer, count=2, seed=0)
    assert text.shape == (64, 2)
    first = next(problems("held-out", 0))
    known = tokenizer.decode(text[:, 0].tolist())
    assert (first.prompt + first.solution).startswith(known[:100])
    samples = sampled_tokens(replace(weights, config=shape), count=2, seed=0)
    assert samples.shape == (64, 2) and (samples[0] == BEGIN_ID).all()
    assert not samples[:, 0].equal(samples[:, 1])
    assert "Question:" in tokenizer.decode(samples[:, 0].tolist())
