"""The models that the mixer is compared with: causal, of the sizes they say, and able to learn."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from srm.engine.config import ModelConfig
from srm.training.baselines.mamba2 import Mamba2, Mamba2Shape, scan
from srm.training.baselines.masked_mixer import MaskedMixerModel, MaskedMixerShape
from srm.training.baselines.rwkv4 import RWKV4, RWKV4Block, RWKV4Shape, weighted_mean
from srm.training.baselines.transformer import (
    PROBES,
    Attention,
    Transformer,
    TransformerShape,
    fastest_attention,
    rotated,
    rotation,
)
from srm.training.baselines.transformer_sampler import TransformerSampler
from srm.training.grpo.rollouts import RolloutSampling
from srm.training.loop import Run
from srm.training.model import SRM, LanguageModel
from srm.training.processes import processes
from srm.training.schedule import Schedule

VOCAB, LENGTH = 29, 70
"""Longer than a chunk of the scan, and no multiple of it."""


def models() -> dict[str, LanguageModel]:
    torch.manual_seed(0)
    shape = {"d_model": 24, "num_layers": 2, "num_heads": 3, "vocab_size": VOCAB}
    return {
        "transformer": Transformer(TransformerShape(hidden=40, **shape)),
        "masked mixer": MaskedMixerModel(MaskedMixerShape(n_ctx=LENGTH, **shape)),
        "mamba 2": Mamba2(Mamba2Shape(d_state=5, num_groups=3, **shape)),
        "rwkv 4": trained_rwkv4(),
    }


def trained_rwkv4() -> RWKV4:
    """With weights where it begins with zeros, which nothing would pass."""
    model = RWKV4(RWKV4Shape(24, 2, VOCAB))
    for parameter in model.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def random_ids(rows: int = 2) -> Tensor:
    return torch.randint(0, VOCAB, (rows, LENGTH), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", list(models()))
@pytest.mark.parametrize("at", [0, 37, 63, 64, LENGTH - 1])
def test_a_token_changes_nothing_before_it_nor_does_the_length(name: str, at: int) -> None:
    model, ids = models()[name].double(), random_ids()
    changed = ids.clone()
    changed[:, at] = (ids[:, at] + 1) % VOCAB
    with torch.no_grad():
        before, after, shorter = model(ids), model(changed), model(ids[:, : at + 1])
    assert before.shape == (2, LENGTH, VOCAB)
    torch.testing.assert_close(after[:, :at], before[:, :at], rtol=0, atol=1e-12)
    torch.testing.assert_close(shorter, before[:, : at + 1], rtol=0, atol=1e-12)
    assert (after[:, at:] - before[:, at:]).abs().amax((0, 2)).min() > 1e-9


@pytest.mark.parametrize("name", list(models()))
def test_a_model_has_the_parameters_that_its_shape_says(name: str) -> None:
    d, n, v, heads = 24, LENGTH, VOCAB, 3
    inner, state = 2 * d, 5
    convolved = inner + 2 * heads * state
    expected = {
        "transformer": d + 2 * (2 * d + 4 * d * d + 3 * d * 40),
        "masked mixer": 2 * (4 * d + 8 * d * d + 5 * d + 2 * (d * d + d) + heads * (n * n + n)),
        "mamba 2": d
        + 2 * (d + d * (inner + convolved + heads) + 5 * convolved + 3 * heads + inner + inner * d),
        "rwkv 4": 4 * d + 2 * (4 * d + 7 * d + 4 * d * d + 9 * d * d),
    }
    total = sum(parameter.numel() for parameter in models()[name].parameters())
    assert total == expected[name] + 2 * v * d


class FewTexts:
    """The same rows at every step."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        ids = random_ids(rows=4)
        return ids[:, :-1], ids[:, 1:]


@pytest.mark.parametrize("name", list(models()))
def test_the_training_loop_trains_it(name: str, tmp_path: Path) -> None:
    """From no better than chance to knowing the rows by heart, gradients of all parameters."""
    model = models()[name]
    schedule = Schedule(30, 0.01, 3, weight_decay=0.0, save_every=30, precision="float32")
    with processes("cpu") as own:
        run = Run(model, schedule, tmp_path, own, {})
        run.train(FewTexts(), [])
    assert run.losses.steps[0] > math.log(VOCAB) - 0.3
    assert run.losses.steps[-1] < 2
    model(random_ids()).square().mean().backward()
    assert all(
        parameter.grad is not None and parameter.grad.abs().sum() > 0
        for parameter in model.parameters()
    )


def test_a_transformer_begins_with_outputs_of_one_size() -> None:
    """However deep and wide it is: neither does the residual stream grow, nor do logits vanish."""
    ids = random_ids(4)
    for width, layers in ((24, 1), (24, 8), (96, 8)):
        torch.manual_seed(0)
        model = Transformer(TransformerShape(width, layers, 3, 2 * width, VOCAB))
        with torch.no_grad():
            stream = model.input_layer(ids)
            for block in model.mixer_blocks:
                stream = block(stream)
            assert 1 <= stream.std() <= 1.5 and 0.8 <= model(ids).std() <= 1.2


def test_training_takes_sines_that_sampling_left() -> None:
    rotation.cache_clear()
    with torch.inference_mode():
        rotated(torch.ones(1, 5, 8))
    x = torch.ones(1, 5, 8, requires_grad=True)
    torch.autograd.backward((rotated(x) * x).sum())


def test_attention_takes_the_way_that_is_faster_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the processor's clock, tried once for a shape; both ways have the same gradients."""
    grads = []
    attention = Attention(TransformerShape(24, 1, 3, 24, VOCAB))
    x = torch.randn(2, 9, 24)
    for slower in (0.0, 1.0):
        seconds = iter([time for _ in range(PROBES) for time in (0.0, slower)] + [0.0, 0.5] * 3)
        monkeypatch.setattr(
            "srm.training.baselines.transformer.time.process_time", seconds.__next__
        )
        fastest_attention.cache_clear()
        way = fastest_attention(3, 16, 8, torch.float32)
        assert way == (SDPBackend.MATH if slower else SDPBackend.FLASH_ATTENTION)
        attention.zero_grad()
        torch.autograd.backward(attention(x).sum())
        assert attention.out.weight.grad is not None
        grads.append(attention.out.weight.grad.clone())
    torch.testing.assert_close(*grads)


def test_a_product_of_rotated_vectors_depends_on_their_gap_alone() -> None:
    query, key = torch.randn(
        2, 1, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    both = (rotated(item.expand(20, 8)) for item in (query, key))
    products = torch.einsum("te,se->ts", *both)
    for gap in (0, 3, 11):
        along = products.diagonal(-gap)
        torch.testing.assert_close(along, along[:1].expand_as(along))
    assert (products[1:, 0] - products[0, 0]).abs().min() > 1e-3


def test_the_structured_mixer_is_a_masked_mixer_of_few_numbers() -> None:
    """With α_t · decay^(t-s) as its matrices, a masked mixer is the SRM with the same tensors."""
    torch.manual_seed(0)
    config = ModelConfig(24, 2, 2, LENGTH, VOCAB, mixer="parallel")
    srm = SRM(config).double()
    model = MaskedMixerModel(MaskedMixerShape(24, 2, 2, LENGTH, VOCAB)).double()
    tensors, position = srm.state_dict(), torch.arange(LENGTH)
    for block in range(2):
        prefix = f"mixer_blocks.{block}.token_mixing_layer."
        decay = tensors.pop(f"{prefix}mixer_heads.decay_value")[1].clamp(0.9, 1)
        alpha = tensors.pop(f"{prefix}mixer_heads.weight")
        powers = decay ** (position[:, None] - position).clamp(min=0)
        weight = torch.stack([alpha[0][:, None] * powers, powers * alpha[1]])
        tensors[f"{prefix}weight"] = weight  # what lies above the diagonal is masked
        tensors[f"{prefix}bias"] = tensors.pop(f"{prefix}mixer_heads.bias")
    model.load_state_dict(tensors)
    with torch.no_grad():
        torch.testing.assert_close(model(random_ids()), srm(random_ids()))


@pytest.mark.parametrize("groups", [1, 3, 6])
@pytest.mark.parametrize("chunk", [1, 16, LENGTH, 100])
def test_the_scan_is_its_recurrence(chunk: int, groups: int) -> None:
    """Token by token, gradients too; rates so low that their powers would overflow upwards."""
    generator = torch.Generator().manual_seed(2)
    x, b, c = (
        torch.randn(2, LENGTH, *tail, dtype=torch.float64, generator=generator, requires_grad=True)
        for tail in ((6, 4), (groups, 5), (groups, 5))
    )
    rate = -30 * torch.rand(2, LENGTH, 6, dtype=torch.float64, generator=generator)
    rate = torch.where(rate < -20, rate, rate / 100).requires_grad_()
    state, expected = torch.zeros(2, 6, 5, 4, dtype=torch.float64), []
    own_b, own_c = (array.repeat_interleave(6 // groups, 2) for array in (b, c))
    for t in range(LENGTH):
        state = rate[:, t].exp()[..., None, None] * state
        state = state + own_b[:, t, :, :, None] * x[:, t, :, None]
        expected.append(torch.einsum("bhn,bhne->bhe", own_c[:, t], state))
    result, wanted = scan(x, rate, b, c, chunk), torch.stack(expected, 1)
    torch.testing.assert_close(result, wanted)
    both = [torch.autograd.grad(item.square().sum(), (x, rate, b, c)) for item in (result, wanted)]
    for gradient, other in zip(*both, strict=True):
        torch.testing.assert_close(gradient, other)


@pytest.mark.parametrize("scale", [1, 100])
@pytest.mark.parametrize("length", [1, 2, 13, 64])
def test_the_weighted_mean_is_its_recurrence(length: int, scale: float) -> None:
    """Token by token, gradients too; e^100 is far beyond float32, and so is e^-100."""
    generator = torch.Generator().manual_seed(3)
    keys, values, fall, bonus = (
        torch.randn(*shape, 5, dtype=torch.float64, generator=generator)
        for shape in ((2, length), (2, length), (), ())
    )
    keys, fall = scale * keys, fall.exp()
    inputs = keys, values, fall, bonus
    for leaf in inputs:
        leaf.requires_grad_()
    numerator = denominator = torch.zeros(2, 5, dtype=torch.float64)
    expected = []
    for t in range(length):
        now = (bonus + keys[:, t]).exp()
        expected.append((numerator + now * values[:, t]) / (denominator + now))
        kept_share, weight = (-fall).exp(), keys[:, t].exp()
        numerator = kept_share * numerator + weight * values[:, t]
        denominator = kept_share * denominator + weight
    result, wanted = weighted_mean(*inputs), torch.stack(expected, 1)
    torch.testing.assert_close(result, wanted)
    both = [torch.autograd.grad(item.square().sum(), inputs, allow_unused=length == 1) for item in
            (result, wanted)]  # fmt: skip
    for gradient, other in zip(*both, strict=True):
        torch.testing.assert_close(gradient, other)
    single = weighted_mean(*(x.detach().float() for x in inputs))
    torch.testing.assert_close(single.double(), wanted.detach(), rtol=1e-4, atol=1e-4)


def test_rwkv_4_is_what_its_equations_say_token_by_token() -> None:
    """The whole model, in float64, with a state of two tokens and two sums a layer."""
    model, ids = trained_rwkv4().double(), random_ids()
    with torch.no_grad():
        result, x = model(ids), model.input_layer(ids)
        for block in model.mixer_blocks:
            assert isinstance(block, RWKV4Block)
            x = block.embedded_norm(x)
            time, channel = block.time_mixing, block.channel_mixing
            last = last_mixed = torch.zeros(2, 24, dtype=torch.float64)
            up = down = torch.zeros(2, 24, dtype=torch.float64)
            rows = []
            for t in range(LENGTH):
                seen = block.time_norm(x[:, t])
                mix = {name: share * seen + (1 - share) * last
                       for name, share in time.shifts.shares.items()}  # fmt: skip
                last = seen
                key, value = time.key(mix["key"]), time.value(mix["value"])
                now = (time.bonus + key).exp()
                mean = (up + now * value) / (down + now)
                fall = (-time.log_fall.exp()).exp()
                up, down = fall * up + key.exp() * value, fall * down + key.exp()
                y = x[:, t] + time.out(torch.sigmoid(time.receptance(mix["receptance"])) * mean)
                seen = block.channel_norm(y)
                mix = {name: share * seen + (1 - share) * last_mixed
                       for name, share in channel.shifts.shares.items()}  # fmt: skip
                last_mixed = seen
                inner = channel.value(channel.key(mix["key"]).clamp(min=0) ** 2)
                rows.append(y + torch.sigmoid(channel.receptance(mix["receptance"])) * inner)
            x = torch.stack(rows, 1)
        torch.testing.assert_close(result, model.output_layer(model.norm(x)))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (lambda: TransformerShape(24, 2, 8, 40, VOCAB), "d_model must be a multiple of 2"),
        (lambda: MaskedMixerShape(24, 2, 5, LENGTH, VOCAB), "num_heads = 5 must divide d_model"),
        (lambda: Mamba2Shape(24, 2, 5, 1, 4, VOCAB), "num_heads = 5 must divide 2"),
        (lambda: Mamba2Shape(24, 2, 6, 4, 4, VOCAB), "num_groups = 4 must divide num_heads = 6"),
    ],
)
def test_heads_that_do_not_fit_are_refused(shape: object, message: str) -> None:
    assert callable(shape)
    with pytest.raises(ValueError, match=message):
        shape()


@pytest.mark.parametrize("count", [650, 3_000])
def test_a_transformer_samples_what_it_would_compute_anew(count: int) -> None:
    """Each drawn token is as likely as the whole model says, though rows end at different times and
    prompts of other lengths run beside, or more samples than run at once."""
    model = models()["transformer"]
    assert isinstance(model, Transformer)
    end, prompts, most = 3, [[5, 6, 7], [5, 6], [7, 5, 6]], 6
    sampler = TransformerSampler(model, end, torch.float32)
    rollouts = sampler.sample(prompts, RolloutSampling(count, most, 1.0, 1.0, seed=1))
    lengths = {len(rollout.token_ids) for own in rollouts for rollout in own}
    assert [len(own) for own in rollouts] == [count] * 3 and lengths == set(range(1, most + 1))
    for prompt, own in zip(prompts, rollouts, strict=True):
        for rollout in own[:50]:
            ids = rollout.token_ids.tolist()
            assert end not in ids[:-1] and rollout.is_ended == (ids[-1] == end)
            assert rollout.is_ended or len(ids) == most
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *ids[:-1]]]))[0, len(prompt) - 1 :]
            expected = logits.log_softmax(-1)[range(len(ids)), ids]
            torch.testing.assert_close(
                torch.from_numpy(rollout.logprobs), expected, atol=1e-4, rtol=1e-4
            )
        with torch.no_grad():
            first = model(torch.tensor([prompt]))[0, -1].softmax(-1)
        for token in first.topk(3).indices.tolist():
            share = np.mean([rollout.token_ids[0] == token for rollout in own])
            assert share == pytest.approx(float(first[token]), abs=0.04)


def test_a_sampled_transformer_takes_other_weights_and_no_other_rules() -> None:
    model, other = models()["transformer"], models()["transformer"]
    assert isinstance(model, Transformer)
    sampling = RolloutSampling(4, 5, 1.0, 1.0, seed=0)
    sampler = TransformerSampler(model, 3, torch.float32)
    (before,) = sampler.sample([[5, 6]], sampling)
    for parameter in other.parameters():
        parameter.data.zero_()
    sampler.load(other.state_dict())
    (after,) = sampler.sample([[5, 6]], sampling)
    assert {rollout.weights_version for rollout in before} == {1}
    assert {rollout.weights_version for rollout in after} == {2}
    assert after[0].logprobs[0] == pytest.approx(-np.log(VOCAB)) != before[0].logprobs[0]
    with pytest.raises(ValueError, match="temperature and top_p must be 1, got"):
        sampler.sample([[5, 6]], RolloutSampling(4, 5, 0.7, 1.0, seed=0))
    with pytest.raises(ValueError, match="temperature and top_p must be 1, got"):
        sampler.sample([[5, 6]], RolloutSampling(4, 5, 1.0, 0.9, seed=0))
