"""The engine in process: both ways to step, and that a prompt is prefilled once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from prometheus_client import REGISTRY

from engine.errors import ContextTooLong, InvalidRequest
from engine.messages import Output, SamplingParams
from engine.process.engine import Engine
from tests.conftest import MakeEngine, MakeRequest
from tests.engines.numpy_runner import TINY, feed, tiny_weights


def metric(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"srm_engine_{name}", labels) or 0.0


def drain(engine: Engine, overlapped: bool = False) -> Iterator[Output]:
    while engine.has_work:
        yield from engine.step_overlapped() if overlapped else engine.step()


def test_greedy_tokens_are_the_models_own(make_engine: MakeEngine) -> None:
    weights = tiny_weights()
    prompt = [5, 9, 3, 3]
    state = np.zeros((TINY.num_layers, TINY.d_model))
    expected: list[int] = []
    for position in range(TINY.n_ctx):
        token = prompt[position] if position < len(prompt) else expected[-1]
        logits, state = feed(weights, token, position, state)
        if position >= len(prompt) - 1:
            expected.append(int(logits.argmax()))
    params = SamplingParams(max_tokens=1000, temperature=0, ignore_eos=True)
    ((output,),) = make_engine().generate([prompt], params)
    assert np.frombuffer(output.token_ids, "<i4").tolist() == expected
    assert len(expected) == TINY.n_ctx - len(prompt) + 1


def test_a_full_context_still_samples_one_token(make_engine: MakeEngine) -> None:
    engine = make_engine()
    (outputs,) = engine.generate([[3] * 64], SamplingParams(max_tokens=5, n=2, ignore_eos=True))
    assert [len(output.token_ids) for output in outputs] == [4, 4]
    assert [output.finish_reason for output in outputs] == ["length"] * 2


@pytest.mark.parametrize("n", [1, 2, 40])
def test_a_prompt_is_prefilled_once_whatever_n(make_engine: MakeEngine, n: int) -> None:
    before = metric("prefill_tokens_total")
    params = SamplingParams(n=n, max_tokens=3, ignore_eos=True)
    (outputs,) = make_engine(num_slots=4, max_step_rows=3, max_step_tokens=7).generate(
        [[3] * 30], params
    )
    assert [output.index for output in outputs] == list(range(n))
    assert metric("prefill_tokens_total") - before == 29


def test_both_ways_to_step_give_the_same_tokens(
    make_engine: MakeEngine, make_request: MakeRequest
) -> None:
    results = []
    for overlapped in (False, True):
        engine = make_engine(num_slots=5, max_step_rows=3, max_step_tokens=9)
        for i in range(6):
            engine.add(
                make_request(
                    str(i),
                    prompt=[i + 2] * (3 * i + 1),
                    n=i + 1,
                    seed=i,
                    max_tokens=20,
                    stop_token_ids=(5,),
                )
            )
        outputs = list(drain(engine, overlapped))
        results.append(sorted(outputs, key=lambda o: (o.id, o.index)))
        assert engine.scheduler.table.num_free == 5
    assert results[0] == results[1]
    assert {"stop", "length"} == {output.finish_reason for output in results[0]}


def test_equal_prompts_are_sampled_from_different_seeds(make_engine: MakeEngine) -> None:
    params = SamplingParams(max_tokens=20, seed=2**64 - 1, ignore_eos=True)
    (first,), (second,) = make_engine().generate([[5, 6], [5, 6]], params)
    assert first.token_ids != second.token_ids


def test_more_prompts_than_the_queue_holds_are_all_completed(make_engine: MakeEngine) -> None:
    engine = make_engine(num_slots=4, max_waiting=6)
    results = engine.generate([[3, i % 32] for i in range(20)], SamplingParams(n=2, max_tokens=2))
    assert [len(outputs) for outputs in results] == [2] * 20


def test_a_refused_prompt_leaves_the_engine_as_it_was(make_engine: MakeEngine) -> None:
    engine = make_engine()
    for params, prompts, error in (
        (SamplingParams(), [[5], [3] * 65], ContextTooLong),
        (SamplingParams(n=101), [[5]], InvalidRequest),
    ):
        with pytest.raises(error):
            engine.generate(prompts, params)
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
def test_a_temperature_or_top_p_of_almost_0_takes_the_likeliest_token(
    make_engine: MakeEngine, params: dict[str, Any]
) -> None:
    common: dict[str, Any] = {"max_tokens": 8, "n": 3, "ignore_eos": True}
    greedy = make_engine().generate([[5, 6]], SamplingParams(**common, temperature=0))
    found = make_engine().generate([[5, 6]], SamplingParams(**common, **params))
    assert [[one.token_ids for one in outputs] for outputs in found] == [
        [one.token_ids for one in outputs] for outputs in greedy
    ]


def test_output_that_is_not_finite_ends_one_sequence_only(
    make_engine: MakeEngine, make_request: MakeRequest
) -> None:
    weights = tiny_weights()
    weights.embedding[31] = np.nan
    for overlapped in (False, True):
        engine = make_engine(model=weights)
        engine.add(make_request("bad", prompt=[5, 31], max_tokens=9))
        engine.add(make_request("good", prompt=[5, 6], max_tokens=9, temperature=0.0))
        outputs = {output.id: output for output in drain(engine, overlapped)}
        assert outputs["bad"].finish_reason == "error"
        assert outputs["bad"].token_ids == b""
        assert "finite" in (outputs["bad"].error or "")
        assert outputs["good"].finish_reason == "length"


def test_aborting_while_a_step_is_under_way_leaves_nothing(
    make_engine: MakeEngine, make_request: MakeRequest
) -> None:
    engine = make_engine()
    engine.add(make_request(n=3, emit="delta"))
    for _ in range(3):
        engine.step_overlapped()
    engine.abort("a")
    engine.abort("never there")
    assert engine.has_work
    assert engine.step_overlapped() == []
    assert not engine.has_work
    assert engine.status().running == 0


def test_metrics_count_what_happened(make_engine: MakeEngine, make_request: MakeRequest) -> None:
    names = {
        "steps_total": {},
        "decode_tokens_total": {},
        "requests_total": {"outcome": "finished"},
        "sequences_total": {"finish_reason": "length"},
        "step_seconds_count": {},
        "batch_rows_sum": {},
    }
    other = [("aborted", 1), ("refused", 1)]
    before = {name: metric(name, **labels) for name, labels in names.items()}
    outcomes_before = [metric("requests_total", outcome=name) for name, _ in other]
    engine = make_engine()
    engine.add(make_request(n=2, max_tokens=3))
    list(drain(engine))
    engine.add(make_request("b"))
    engine.abort("b")
    with pytest.raises(InvalidRequest):
        engine.add(make_request(n=0))
    grown = {name: metric(name, **labels) - before[name] for name, labels in names.items()}
    assert grown == {
        "steps_total": 4,
        "decode_tokens_total": 6,
        "requests_total": 1,
        "sequences_total": 2,
        "step_seconds_count": 4,
        "batch_rows_sum": 7,
    }
    for (name, count), start in zip(other, outcomes_before, strict=True):
        assert metric("requests_total", outcome=name) - start == count
    assert metric("num_slots") == metric("free_slots") == 8
    assert metric("running_sequences") == metric("waiting_sequences") == 0


def test_kept_prefixes_are_counted(make_engine: MakeEngine, make_request: MakeRequest) -> None:
    names = ("prefix_hits_total", "cached_tokens_total", "prefix_evictions_total")
    before = {name: metric(name) for name in names}
    engine = make_engine(prefix_slots=2)
    for i, prompt in enumerate(([5, 6, 7], [5, 6, 7], [5, 6, 7, 8, 9], [9, 9], [8, 8])):
        engine.add(make_request(str(i), prompt=prompt, max_tokens=1))
        list(drain(engine))
    assert [metric(name) - before[name] for name in names] == [2, 4, 2]
    assert metric("prefixes") == 2
    engine.load_weights(tiny_weights(seed=1))
    assert metric("prefixes") == 0
