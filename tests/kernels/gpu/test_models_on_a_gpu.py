"""Whole models on an H100 or H200: as near to float64 as rounding allows, and the same in any slot.

The likeliest tokens' divergence from the model in float64 must be no more than MOST times that of
the same model in float64 whose weights and activations are rounded, to bfloat16 or float8, wherever
a step may round them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from research.bench.engine.decode import decode_rows, random_runner, random_tokens
from research.bench.engine.models import StepsConfig
from research.bench.engine.ops import widened
from research.bench.frame import random_shape
from srm.engine.config import Dtype, EngineConfig, ModelConfig
from srm.engine.device.linear import round_bfloat16
from srm.engine.device.products import VariantName
from srm.engine.device.runner import ModelRunner
from srm.engine.messages import MAX_LOGPROBS, SamplingParams
from srm.engine.process.engine import Engine
from srm.engine.steps.batch import FROM_DEVICE, I32
from srm.engine.weights.random_model import random_tensors
from srm.engine.weights.weights import Weights, fold
from tests.kernels.product_checks import float8_mixer, int8_mixer
from tests.kit.engines.numpy_runner import F64, Kept, as_it_is, feed, in_float64

pytestmark = pytest.mark.gpu

MOST = 4.0
PROMPTS, LENGTH = 4, 12
STEPS, ROWS = 6, 4_500
"""More rows than get small tiles."""
SLOTS = 600_000
"""Of d 1,024 they hold more than 2^32 values."""


def rounded(values: F64) -> F64:
    return widened(round_bfloat16(values.astype(np.float32))).astype(np.float64)


def logprobs_of(
    weights: Weights,
    ids: list[int],
    rounding: Kept = as_it_is,
    mixers: Sequence[Callable[[F64], F64]] = (),
) -> F64:
    """f64[len(ids) - 1, V]: of what follows each token but the last."""
    state, rows = np.zeros(weights.config.state_width), []
    for position, token in enumerate(ids[:-1]):
        logits, state = feed(weights, token, position, state, rounding, mixers)
        rows.append(rounding(logits) - np.logaddexp.reduce(rounding(logits)))
    return np.stack(rows)


def scored(model: ModelConfig, runner: ModelRunner, prompts: list[list[int]]) -> tuple[I32, F64]:
    """The likeliest tokens at each place but the last, and their log-probabilities."""
    engine = Engine(model, runner, EngineConfig(num_slots=runner.num_slots))
    params = SamplingParams(max_tokens=0, prompt_logprobs=MAX_LOGPROBS)
    outputs = [output for output, *_ in engine.generate(prompts, params)]
    shape = (PROMPTS, LENGTH - 1, -1)
    top = np.stack([np.frombuffer(output.top_ids, "<i4") for output in outputs])
    logprobs = np.stack([np.frombuffer(output.top_logprobs, "<f4") for output in outputs])
    return top.reshape(shape), logprobs.reshape(shape).astype(np.float64)


def divergence(logp: F64, logq: F64) -> float:
    """Of the scored tokens alone, no term of which is negative."""
    p, q = np.exp(logp), np.exp(logq)
    return float((p * (logp - logq) - p + q).sum(2).mean())


@pytest.mark.parametrize(
    ("dtype", "variants"), [("bfloat16", ()), ("float8", ()), ("float8", ("int8",))]
)
@pytest.mark.parametrize("width", [1024, 512])
def test_the_likeliest_tokens_are_those_of_float64(
    width: int, dtype: Dtype, variants: tuple[VariantName, ...], kept_graphs: Path
) -> None:
    model = random_shape(width)
    config = StepsConfig(cache_dir=kept_graphs, variants=variants)
    prompts = np.random.default_rng(1).integers(model.vocab_size, size=(PROMPTS, LENGTH)).tolist()
    runner = random_runner(model, config, dtype, LENGTH)
    top, logprobs = scored(model, runner, prompts)
    runner.close()
    weights = fold(model, random_tensors(model), "random")
    mixer = int8_mixer if variants else float8_mixer
    mixers = [mixer(layer) for layer in weights.layers if dtype == "float8"]
    exact, narrow = in_float64(weights), in_float64(weights, rounded)
    tables = (
        np.stack([logprobs_of(exact, ids) for ids in prompts]),
        np.stack([logprobs_of(narrow, ids, rounded, mixers) for ids in prompts]),
    )
    logp, logr = (np.take_along_axis(table, top, axis=2) for table in tables)
    ours, allowed = divergence(logp, logprobs), divergence(logp, logr)
    how = " ".join([dtype, *variants])
    print(f"d {width}, {how}: divergence {ours:.3g}, of rounding {allowed:.3g}")
    assert ours < MOST * allowed


def decoded(model: ModelConfig, runner: ModelRunner, slots: I32, then: I32) -> list[np.ndarray]:
    """Tokens, log-probabilities and states of sequences that are parked halfway, and go on in other
    slots."""
    (fed,) = random_tokens(model, 1, len(slots))
    values = []
    for position in range(STEPS):
        if position == STEPS // 2:
            states = runner.read_slots(slots.astype(np.int64))
            slots = then
            runner.write_slots(slots.astype(np.int64), states)
        result = runner.launch(decode_rows(fed, position, 0.9, slots)).wait()
        values += [result.token_ids, result.logprobs.view(np.int32)]
        fed = np.full(len(slots), FROM_DEVICE, np.int32)
    return [*values, runner.read_slots(slots.astype(np.int64)).states.view(np.int32)]


def test_sequences_are_the_same_beyond_2_to_the_32_values(kept_graphs: Path) -> None:
    model = random_shape(1024)
    runner = random_runner(model, StepsConfig(cache_dir=kept_graphs), "bfloat16", ROWS, SLOTS)
    assert runner.num_slots * model.state_width > 2**32
    low = np.arange(ROWS, dtype=np.int32)
    high = low + np.int32(SLOTS - ROWS)
    expected = decoded(model, runner, low, low)
    assert len(np.unique(expected[0])) > STEPS
    for slots, then in ((high, high), (low, high)):
        for result, wanted in zip(decoded(model, runner, slots, then), expected, strict=True):
            assert np.array_equal(result, wanted)
    runner.close()


@pytest.mark.parametrize("variant", ["mixed", "pdl"])
def test_a_variant_changes_no_bit(variant: VariantName, kept_graphs: Path) -> None:
    """Prompts' scores, tokens and states are compared; of replayed steps by `srm bench replays`."""
    model, slots = random_shape(512), np.arange(ROWS, dtype=np.int32)
    prompts = np.random.default_rng(1).integers(model.vocab_size, size=(PROMPTS, LENGTH)).tolist()
    results = []
    ways: list[tuple[VariantName, ...]] = [(), (variant,)]
    for variants in ways:
        config = StepsConfig(cache_dir=kept_graphs, variants=variants)
        runner = random_runner(model, config, "bfloat16", ROWS)
        top, logprobs = scored(model, runner, prompts)
        results.append([top, logprobs.view(np.int64), *decoded(model, runner, slots, slots[::-1])])
        runner.close()
    for today, other in zip(*results, strict=True):
        assert np.array_equal(today, other)
