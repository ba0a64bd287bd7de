"""The engine in process: what it generates and counts."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import REGISTRY

from srm.engine.messages import SamplingParams
from srm.errors import ContextTooLong, InvalidRequest
from tests.kit.engines.making import engine_of, request_of
from tests.kit.engines.numpy_runner import tiny_weights
from tests.kit.processes.run_engine import run


def metric(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"srm_engine_{name}", labels) or 0.0


def test_prompts_are_completed_whatever_the_queue_holds_with_seeds_of_their_own() -> None:
    params = SamplingParams(n=2, max_tokens=20, seed=2**64 - 1, ignore_eos=True)
    results = engine_of(num_slots=4, max_waiting=6).generate([[3, 4]] * 20, params)
    assert [len(outputs) for outputs in results] == [2] * 20
    assert len({output.token_ids for outputs in results for output in outputs}) == 40


@pytest.mark.parametrize(
    ("prompts", "n", "error"), [([[5], [3] * 65], 1, ContextTooLong), ([[5]], 101, InvalidRequest)]
)
def test_a_refused_prompt_leaves_the_engine_as_it_was(
    prompts: list[list[int]], n: int, error: type[Exception]
) -> None:
    engine = engine_of()
    with pytest.raises(error):
        engine.generate(prompts, SamplingParams(n=n))
    assert not engine.has_work
    assert engine.scheduler.table.num_free == 8


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1e-9},
        {"temperature": 5, "top_p": 0},
        {"temperature": 100, "top_p": 1e-46},  # 0 in float32
        {"temperature": 5, "top_p": 0, "top_k": 3, "min_p": 0.01},
    ],
)
def test_a_temperature_or_top_p_of_almost_0_takes_the_likeliest_token(params: Any) -> None:
    result, greedy = (
        engine_of().generate([[5, 6]], SamplingParams(max_tokens=8, n=3, ignore_eos=True, **own))
        for own in (params, {"temperature": 0})
    )
    assert [item.token_ids for item in result[0]] == [token.token_ids for token in greedy[0]]


def test_metrics_count_what_happened() -> None:
    expected = {
        ("steps_total",): 4,
        ("decode_tokens_total",): 6,
        ("prefill_tokens_total",): 2,
        ("requests_total", "outcome", "finished"): 1,
        ("requests_total", "outcome", "aborted"): 1,
        ("requests_total", "outcome", "refused"): 1,
        ("sequences_total", "finish_reason", "length"): 2,
        ("step_seconds_count",): 4,
        ("batch_rows_sum",): 7,
    }

    def now() -> list[float]:
        return [metric(name, **dict([label] if label else [])) for name, *label in expected]

    before, engine = now(), engine_of()
    engine.add(request_of(n=2, max_tokens=3))
    run(engine)
    engine.add(request_of("b"))
    engine.abort("b")
    with pytest.raises(InvalidRequest):
        engine.add(request_of(n=0))
    grown = [later - earlier for later, earlier in zip(now(), before, strict=True)]
    assert grown == list(expected.values())
    assert metric("num_slots") == metric("free_slots") == 8
    assert metric("running_sequences") == metric("waiting_sequences") == 0


def test_kept_prefixes_are_counted() -> None:
    names = ("prefix_hits_total", "cached_tokens_total", "prefix_evictions_total")
    before = {name: metric(name) for name in names}
    engine = engine_of(prefix_slots=2)
    for i, prompt in enumerate(([5, 6, 7], [5, 6, 7], [5, 6, 7, 8, 9], [9, 9], [8, 8])):
        engine.add(request_of(str(i), prompt, max_tokens=1))
        run(engine)
    assert [metric(name) - before[name] for name in names] == [2, 4, 2]
    assert metric("prefixes") == 2
    engine.load_weights(tiny_weights(seed=1))
    assert metric("prefixes") == 0
