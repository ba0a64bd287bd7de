"""The whole step in bfloat16 on a device is as near to the model in float64 as rounding allows.

What rounding does was measured by emulation: the record 2026-11-20-c6c00c8-precision gives the
bounds. This is what a GPU, where nothing else of the model is tested, has to pass first; the same
code runs on the CPU. The oracle is `tests.kit.engines.numpy_runner`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from srm.engine.config import DEMO_MODEL
from srm.engine.messages import MAX_LOGPROBS, SamplingParams
from srm.engine.process.engine import Engine
from srm.engine.weights.checkpoint import load_checkpoint
from srm.engine.weights.weights import Weights
from srm.loadtest.records import RECORDS
from tests.kit.engines.numpy_runner import F64, feed, in_float64
from tests.kit.models.demo import engine_on_max, prompts

CASES = {"cpu": "step bf16, logits f32", "gpu": "step bf16", "torch:cpu": "step bf16"}
"""The case of the record for each device: a GPU, and PyTorch, round the logits too."""


@pytest.fixture(scope="module")
def engine(device: str) -> Iterator[Engine]:
    with engine_on_max(device=device, dtype="bfloat16", num_slots=512) as engine:
        yield engine


def measured(device: str) -> dict[str, Any]:
    """What the record says of problems fed to the demo model."""
    record = json.loads((RECORDS / "2026-11-20-c6c00c8-precision.json").read_text())
    models = {model["name"]: model for model in record["models"]}
    cases: list[dict[str, Any]] = models["demo, problems"]["cases"]
    (result,) = (case for case in cases if case["case"] == CASES[device])
    return result


@pytest.fixture(scope="module")
def exact() -> Weights:
    weights: Weights = in_float64(load_checkpoint(DEMO_MODEL))
    return weights


def exact_logprobs(weights: Weights, ids: list[int]) -> F64:
    """f64[len(ids), V]: of what follows each token."""
    state, rows = np.zeros(weights.config.state_width), []
    for position, token in enumerate(ids):
        logits, state = feed(weights, token, position, state)
        rows.append(logits - np.logaddexp.reduce(logits))
    return np.stack(rows)


def test_prompts_score_as_in_float64_but_for_rounding(
    device: str, engine: Engine, exact: Weights
) -> None:
    texts = prompts(6, seed=23, solved=True)
    params = SamplingParams(max_tokens=0, prompt_logprobs=MAX_LOGPROBS)
    divergences, same = [], []
    for ids, (result, *_) in zip(texts, engine.generate(texts, params), strict=True):
        expected = exact_logprobs(exact, ids)[:-1]
        top = np.frombuffer(result.top_ids, "<i4").reshape(-1, MAX_LOGPROBS)
        logq = np.frombuffer(result.top_logprobs, "<f4").reshape(top.shape).astype(np.float64)
        logp = np.take_along_axis(expected, top, axis=1)
        # The part of the divergence that lies in these tokens: no term of it is negative.
        p, q = np.exp(logp), np.exp(logq)
        divergences.append((p * (logp - logq) - p + q).sum(axis=1))
        same.append(top[:, 0] == expected.argmax(axis=1))
    divergence, rounding = float(np.concatenate(divergences).mean()), measured(device)
    assert rounding["kl_mean"] / 100 < divergence < 2 * rounding["kl_mean"]
    assert np.concatenate(same).mean() > rounding["greedy_agreement"] - 0.03


def test_tokens_are_sampled_as_often_as_float64_says(engine: Engine, exact: Weights) -> None:
    ids, count = prompts(1, seed=23, solved=True)[0][:30], 6_000
    expected = np.exp(exact_logprobs(exact, ids)[-1])
    (samples,) = engine.generate([ids], SamplingParams(n=count, max_tokens=1, ignore_eos=True))
    drawn = np.concatenate([np.frombuffer(sample.token_ids, "<i4") for sample in samples])
    often = np.bincount(drawn, minlength=len(expected)) / count
    by_chance = 6 * np.sqrt(expected * (1 - expected) / count)
    assert len(np.unique(drawn)) > 1
    assert (np.abs(often - expected) < by_chance + 0.05 * expected + 1e-4).all()
