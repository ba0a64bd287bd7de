"""Who gives a slot up to whom; `tests/property/test_engine_machine.py` holds that all go on."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from srm.engine.messages import Request
from srm.engine.process.engine import Engine
from srm.engine.scheduler.accept import accept
from srm.engine.scheduler.parking import check_fits, parkable
from srm.engine.state.parked import Parked, merged
from srm.engine.steps.batch import SlotStates
from srm.errors import InvalidRequest
from tests.kit.engines.making import engine_of, request_of
from tests.kit.engines.numpy_runner import TINY
from tests.kit.processes.run_engine import run, tokens


def running(engine: Engine) -> Counter[str]:
    """Sequences with a slot, by request."""
    scheduler = engine.scheduler
    owners = scheduler.table.first_id[scheduler.table.first_id >= 0].tolist()
    return Counter(scheduler.registry.by_first_id[owner].request.id for owner in owners)


def alone(*requests: Request) -> dict[tuple[str, int], bytes]:
    """What undisturbed requests say."""
    engine = engine_of(num_slots=64, max_step_rows=64, max_step_tokens=256)
    for request in requests:
        engine.add(request)
    return tokens(run(engine))


def test_the_youngest_of_the_lowest_priority_are_parked_and_no_more_than_are_needed() -> None:
    engine = engine_of(num_slots=6)
    for name, priority in (("old", -2), ("young", -2), ("middle", -1)):
        engine.add(request_of(name, [5], n=2, max_tokens=30, priority=priority))
    run(engine, 3)
    engine.add(request_of("high", [6], n=3, max_tokens=30))
    run(engine, 1)
    assert running(engine) == {"high": 3, "middle": 2, "old": 1}
    records = engine.scheduler.parking.records()
    indices = {group.request.id: parked.indices.tolist() for group, parked in records}
    assert indices == {"young": [0, 1], "old": [1]}


def test_sampled_tokens_are_counted_wherever_a_sequence_is() -> None:
    """In a slot, parked, not begun or ended."""
    engine = engine_of(num_slots=4)
    engine.add(request_of("low", [5, 6], n=6, max_tokens=30, priority=-1))
    run(engine, 3)
    engine.add(request_of("high", [6], n=2, max_tokens=2))
    run(engine, 1)
    engine.settle()
    assert running(engine) == {"high": 2, "low": 2}
    for name in ("low", "high", "ended"):
        sampled = engine.scheduler.count_sampled(name)
        ended = engine.end(name) if engine.has_request(name) else []
        assert sampled == sum(len(output.token_ids) for output in ended) // 4
        assert bool(sampled) == bool(ended)


def test_nobody_is_parked_for_an_equal_or_before_it_has_sampled() -> None:
    engine = engine_of(num_slots=2)
    for name in ("first", "equal"):
        engine.add(request_of(name, [5], n=2, max_tokens=9, priority=-1))
    engine.step()
    assert not len(engine.scheduler.choose_preempted())
    assert running(engine) == {"first": 2}
    engine = engine_of(num_slots=2, max_step_tokens=9)
    for name in ("long", "other"):
        engine.add(request_of(name, [5] * 30, max_tokens=9, priority=-1))
    engine.step()
    engine.add(request_of("high", [5], n=2, max_tokens=9))
    engine.step()
    assert running(engine) == {"long": 1, "high": 1}, "a prompt under way was given up"
    engine = engine_of(num_slots=2, prefix_slots=1)
    engine.add(request_of("low", n=2, max_tokens=9, priority=-1))
    run(engine, 3)
    for name in ("high", "no slot for its prefix"):
        engine.add(request_of(name, [9, len(name)], n=2, max_tokens=9))
    assert not len(engine.scheduler.choose_preempted()), "a prefix to be made needs no slot"


@pytest.mark.parametrize(("most", "parked"), [(0, 0), (600, 2), (10_000, 4)])
def test_what_may_be_parked_is_bounded(most: int, parked: int) -> None:
    engine = engine_of(num_slots=4, max_parked_bytes=most)
    engine.add(request_of("low", n=4, max_tokens=30, priority=-1))
    run(engine, 4)
    engine.add(request_of("high", [6], n=4, max_tokens=5))
    run(engine, 1)
    assert engine.scheduler.parking.num_parked == parked


def test_a_prompt_is_counted_once_though_its_samples_are_parked() -> None:
    request = request_of("low", n=3, max_tokens=9, durable=True)
    engine, other = engine_of(num_slots=4), engine_of(num_slots=4)
    engine.add(request)
    run(engine, 3)
    with pytest.raises(AssertionError, match="settle"):
        next(engine.parked_of_all())  # a step is under way
    engine.settle()
    slots = parkable(engine.scheduler.table)
    engine.scheduler.park(slots, engine.runner.read_slots(slots))
    other.add(request, merged([parked for _, parked in engine.parked_of_all()]))
    for item in (engine, other):
        run(item)
        assert item.scheduler.latencies.num_prompt_tokens == item.scheduler.parking.num_resumed == 3
    assert engine.scheduler.parking.num_ever_parked == 3


@pytest.mark.parametrize("emit", ["final", "delta"])
@pytest.mark.parametrize(("steps", "is_over"), [(1, False), (4, False), (7, False), (12, True)])
def test_a_durable_request_that_is_sent_again_is_answered_in_full(
    steps: int, is_over: bool, emit: str
) -> None:
    request = request_of(n=7, max_tokens=6, seed=5, emit=emit, durable=True, stop_token_ids=(3,))
    expected = alone(request)
    engine = engine_of(num_slots=4, max_step_rows=3)
    engine.add(request)
    run(engine, steps)
    engine.stop("a", np.array([0], np.int32), 5)  # of which the next sender knows nothing
    sampled = engine.scheduler.latencies.num_sampled
    assert engine.has_request("a") != is_over
    engine.add(request)
    assert tokens(run(engine)) == expected
    if steps in {4, 7}:  # some of it was not done again
        anew = engine.scheduler.latencies.num_sampled - sampled
        assert anew < sum(len(output) for output in expected.values()) // 4


def test_another_request_of_the_same_id_starts_anew() -> None:
    other = request_of(prompt=[7, 7], n=2, max_tokens=6, durable=True)
    scored = request_of(n=2, max_tokens=6, durable=True, emit="delta", logprobs=2)
    for request in (other, scored):
        engine = engine_of()
        engine.add(scored)
        run(engine, 4)
        engine.add(request)
        assert tokens(run(engine)) == alone(request)
    engine.add(request_of(max_tokens=6))
    with pytest.raises(InvalidRequest, match="in use"):
        engine.add(other)
    with pytest.raises(InvalidRequest, match="durable must be false where emit is tokens"):
        engine.add(request_of("b", emit="tokens", durable=True))


@pytest.mark.parametrize(
    "wrong",
    [
        *({"indices": np.array(indices)} for indices in ([1, 1], [2, 1], [-1, 1], [1, 3])),
        {"positions": np.array([2, 3], np.int32), "tokens": (b"", b"****")},
        {"positions": np.array([4, 7], np.int32), "tokens": (b"*" * 8, b"*" * 20)},
        {"tokens": (b"****", b"****")},
        {"logprobs": (b"", b"****")},
        {"states": SlotStates(np.zeros((1, 2), np.float32), np.zeros(1, np.int32))},
    ],
)
def test_what_is_not_of_a_request_is_not_gone_on_with(wrong: dict[str, Any]) -> None:
    group = accept(request_of(n=3, max_tokens=5), TINY, 0)
    right = Parked(
        indices=np.array([0, 2]),
        positions=np.array([3, 6], np.int32),  # one token, and all but the last
        states=SlotStates(np.zeros((2, 2), np.float32), np.zeros(2, np.int32)),
        tokens=(b"*" * 4, b"*" * 16),
        logprobs=(b"", b""),
    )
    check_fits(group, right)
    with pytest.raises(AssertionError):
        check_fits(group, replace(right, **wrong))


def test_nothing_is_kept_of_what_is_not_durable() -> None:
    engine = engine_of(num_slots=4)
    engine.add(request_of("low", n=9, max_tokens=30, priority=-1))
    run(engine, 4)
    engine.settle()
    assert not list(engine.parked_of_all())
    engine.add(request_of("high", [9, 8], n=4, max_tokens=5))
    run(engine, 2)
    engine.settle()
    assert not list(engine.parked_of_all()), "nor of what is parked"
