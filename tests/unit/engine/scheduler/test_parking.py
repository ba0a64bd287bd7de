"""Who gives a slot up to whom, and that what is parked goes on as if it had never stopped."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engine.errors import InvalidRequest
from engine.messages import Request
from engine.process.engine import Engine
from engine.scheduler.accept import accept
from engine.scheduler.parking import check_fits, parkable
from engine.state.parked import Parked, merged
from engine.steps.batch import SlotStates
from tests.conftest import MakeEngine, MakeRequest
from tests.engines.numpy_runner import TINY
from tests.engines.run_engine import run, tokens

NOBODY = np.empty(0, np.int32)


def running(engine: Engine) -> Counter[str]:
    """Sequences with a slot, by request."""
    scheduler = engine.scheduler
    owners = scheduler.table.first_id[scheduler.table.first_id >= 0].tolist()
    return Counter(scheduler._roster.by_first_id[owner].request.id for owner in owners)


def expected_of(make_engine: MakeEngine, *requests: Request) -> dict[tuple[str, int], bytes]:
    """What undisturbed requests say."""
    engine = make_engine(num_slots=64, max_step_rows=64, max_step_tokens=256)
    for request in requests:
        engine.add(request)
    return tokens(run(engine))


@pytest.mark.parametrize("emit", ["final", "delta"])
def test_what_was_parked_says_the_same(
    make_engine: MakeEngine, make_request: MakeRequest, emit: str
) -> None:
    low = make_request("low", n=6, max_tokens=20, seed=3, priority=-1, emit=emit, logprobs=0)
    penal = make_request("penal", n=2, max_tokens=20, presence_penalty=1.5, priority=-1)
    high = make_request("high", prompt=[9, 8], n=5, max_tokens=6)
    expected = expected_of(make_engine, low, penal, high)
    engine = make_engine(num_slots=8)
    engine.add(low)
    engine.add(penal)
    said = run(engine, 5)
    engine.add(high)
    said += run(engine, 3)
    assert running(engine)["high"] == 5
    assert engine.scheduler.parking.num_parked == 5
    said += run(engine)
    assert tokens(said) == expected
    assert engine.scheduler.parking.num_ever_parked == engine.scheduler.parking.num_resumed == 5


def test_the_youngest_of_the_lowest_priority_are_parked_and_no_more_than_are_needed(
    make_engine: MakeEngine, make_request: MakeRequest
) -> None:
    engine = make_engine(num_slots=6)
    for name, priority in (("old", -2), ("young", -2), ("middle", -1)):
        engine.add(make_request(name, prompt=[5], n=2, max_tokens=30, priority=priority))
    run(engine, 3)
    engine.add(make_request("high", prompt=[6], n=3, max_tokens=30))
    run(engine, 1)
    assert running(engine) == {"high": 3, "middle": 2, "old": 1}
    indices = {
        group.request.id: parked.indices.tolist()
        for group, parked in engine.scheduler.parking.records()
    }
    assert indices == {"young": [0, 1], "old": [1]}


def test_nobody_is_parked_for_an_equal_or_before_it_has_sampled(
    make_engine: MakeEngine, make_request: MakeRequest
) -> None:
    engine = make_engine(num_slots=2)
    engine.add(make_request("first", prompt=[5], n=2, max_tokens=9, priority=-1))
    engine.add(make_request("equal", prompt=[5], n=2, max_tokens=9, priority=-1))
    engine.step()
    assert not len(engine.scheduler.victims())
    assert running(engine) == {"first": 2}
    engine = make_engine(num_slots=2, max_step_tokens=9)
    engine.add(make_request("long", prompt=[5] * 30, max_tokens=9, priority=-1))
    engine.add(make_request("other", prompt=[5] * 30, max_tokens=9, priority=-1))
    engine.step()
    engine.add(make_request("high", prompt=[5], n=2, max_tokens=9))
    engine.step()
    assert running(engine) == {"long": 1, "high": 1}, "a prompt under way was given up"


def test_what_may_be_parked_is_bounded(make_engine: MakeEngine, make_request: MakeRequest) -> None:
    for most, parked in ((0, 0), (600, 2), (10_000, 4)):
        engine = make_engine(num_slots=4, max_parked_bytes=most)
        engine.add(make_request("low", prompt=[5], n=4, max_tokens=30, priority=-1))
        run(engine, 3)
        engine.add(make_request("high", prompt=[6], n=4, max_tokens=30))
        run(engine, 1)
        assert engine.scheduler.parking.num_parked == parked


def test_parked_samples_can_be_stopped_and_aborted(
    make_engine: MakeEngine, make_request: MakeRequest
) -> None:
    engine = make_engine(num_slots=4)
    engine.add(make_request("low", n=9, max_tokens=30, priority=-1))
    run(engine, 4)
    engine.add(make_request("high", prompt=[6], n=4, max_tokens=5))
    run(engine, 1)
    assert engine.scheduler.parking.num_parked == 4
    engine.stop("low", np.array([1], np.int32), 3)
    assert engine.scheduler.parking.indices(engine.scheduler._roster.by_id["low"]).tolist() == [
        0,
        2,
    ]
    assert sorted(tokens(run(engine))) == [*(("high", i) for i in range(4)), ("low", 0), ("low", 2)]
    engine.add(make_request("low", n=9, max_tokens=30, priority=-1))
    run(engine, 4)
    engine.add(make_request("high", prompt=[6], n=4, max_tokens=5))
    run(engine, 1)
    engine.abort("low")
    assert (engine.scheduler.parking.num_parked, engine.scheduler.parking.num_bytes) == (0, 0)
    assert {output.id for output in run(engine)} == {"high"}


@pytest.mark.parametrize("indices, cut", [([2], None), ([2, 3], None), ([], 3), ([0, 1, 2], 3)])
def test_samples_that_were_parked_one_after_the_other_can_be_stopped(
    make_engine: MakeEngine, make_request: MakeRequest, indices: list[int], cut: int | None
) -> None:
    engine = make_engine(num_slots=4)
    engine.add(make_request("low", n=4, max_tokens=9, priority=-1))
    run(engine, 3)
    engine.settle()
    slots = parkable(engine.scheduler.table)
    for some in (slots[2:], slots[:2]):  # samples 0 and 1, then 2 and 3
        engine.scheduler.park(some, engine._runner.read_slots(some))
    engine.stop("low", np.array(indices, np.int32), cut)
    left = sorted(set(range(4)) - {*indices, *range(4 if cut is None else cut, 4)})
    assert engine.scheduler.parking.num_parked == len(left)
    assert sorted(tokens(run(engine))) == [("low", index) for index in left]
    assert engine.scheduler.parking.num_bytes == 0


def test_a_prompt_is_counted_once_though_its_samples_are_parked(
    make_engine: MakeEngine, make_request: MakeRequest
) -> None:
    request = make_request("low", n=3, max_tokens=9, durable=True)
    engine = make_engine(num_slots=4)
    engine.add(request)
    run(engine, 3)
    engine.settle()
    slots = parkable(engine.scheduler.table)
    engine.scheduler.park(slots, engine._runner.read_slots(slots))
    kept = merged([parked for _, parked in engine.parked_of_all()])
    run(engine)
    assert engine.scheduler.latencies.num_prompt_tokens == 3
    other = make_engine(num_slots=4)
    other.add(request, kept)
    run(other)
    assert other.scheduler.latencies.num_prompt_tokens == 3


@pytest.mark.parametrize("emit", ["final", "delta"])
@pytest.mark.parametrize("steps", [0, 1, 2, 4, 7, 12])
def test_a_durable_request_that_is_sent_again_is_answered_in_full(
    make_engine: MakeEngine, make_request: MakeRequest, emit: str, steps: int
) -> None:
    request = make_request(n=7, max_tokens=6, seed=5, emit=emit, durable=True, stop_token_ids=(3,))
    expected = expected_of(make_engine, request)
    engine = make_engine(num_slots=4, max_step_rows=3)
    engine.add(request)
    run(engine, steps)
    engine.stop("a", np.array([0], np.int32), 5)  # of which the next sender knows nothing
    sampled = engine.scheduler.latencies.num_sampled
    if engine.has_request("a"):
        engine.add(request)
    else:
        assert steps == 12
        engine.add(request)
        sampled = 0
    assert tokens(run(engine)) == expected
    if steps in {4, 7}:  # some of it was not done again
        anew = engine.scheduler.latencies.num_sampled - sampled
        assert anew < sum(len(one) for one in expected.values()) // 4
    assert engine.scheduler.num_waiting == engine.scheduler.waiting_bytes == 0
    assert engine.scheduler.prefixes.num_pinned == 0


def test_another_request_of_the_same_id_starts_anew(
    make_engine: MakeEngine, make_request: MakeRequest
) -> None:
    other = make_request(prompt=[7, 7], n=2, max_tokens=6, durable=True)
    scored = make_request(n=2, max_tokens=6, durable=True, emit="delta", logprobs=2)
    for request in (other, scored):
        expected = expected_of(make_engine, request)
        engine = make_engine()
        engine.add(scored)
        run(engine, 4)
        engine.add(request)
        assert tokens(run(engine)) == expected
    engine.add(make_request(max_tokens=6))
    with pytest.raises(InvalidRequest, match="in use"):
        engine.add(other)
    with pytest.raises(InvalidRequest, match="durable must be false where emit is columns"):
        engine.add(make_request("b", emit="columns", durable=True))


@pytest.mark.parametrize(
    "wrong",
    [
        {"indices": np.array([1, 1])},
        {"indices": np.array([2, 1])},
        {"indices": np.array([-1, 1])},
        {"indices": np.array([1, 3])},
        {"positions": np.array([2, 3], np.int32), "tokens": (b"", b"****")},
        {"positions": np.array([4, 7], np.int32), "tokens": (b"*" * 8, b"*" * 20)},
        {"tokens": (b"****", b"****")},
        {"logprobs": (b"", b"****")},
        {"states": SlotStates(np.zeros((1, 2), np.float32), np.zeros(1, np.int32))},
    ],
)
def test_what_is_not_of_a_request_is_not_gone_on_with(
    make_request: MakeRequest, wrong: dict[str, Any]
) -> None:
    group = accept(make_request(n=3, max_tokens=5), TINY, 0)
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


def test_another_engine_goes_on_where_this_one_was(
    make_engine: MakeEngine, make_request: MakeRequest
) -> None:
    requests = [
        make_request("low", n=9, max_tokens=20, seed=1, priority=-1, durable=True),
        make_request("delta", [4, 5], n=3, max_tokens=20, emit="delta", logprobs=0, durable=True),
        make_request("scored", [4, 5], max_tokens=20, prompt_logprobs=1, durable=True),
    ]
    expected = expected_of(make_engine, *requests)
    engine = make_engine(num_slots=8)
    engine.add(requests[0])
    run(engine, 5)
    for request in requests[1:]:
        engine.add(request)
    engine.add(make_request("passing", max_tokens=20))
    run(engine, 6)
    assert engine.scheduler.parking.num_parked > 0
    engine.settle()
    kept: dict[str, list[Parked]] = {}
    for request, parked in engine.parked_of_all():
        kept.setdefault(request.id, []).append(parked)
    assert set(kept) == {"low", "delta"}
    after = make_engine(num_slots=5)
    after.progress = lambda request: merged(kept[request.id]) if request.id in kept else None
    for request in reversed(requests):
        after.add(request)
    assert tokens(run(after)) == expected
    assert after.scheduler.parking.num_resumed >= sum(map(len, map(merged, kept.values())))


def test_nothing_is_read_of_a_step_under_way(
    make_engine: MakeEngine, make_request: MakeRequest
) -> None:
    engine = make_engine()
    engine.add(make_request(durable=True, max_tokens=9))
    run(engine, 3)
    with pytest.raises(AssertionError, match="settle"):
        next(engine.parked_of_all())
    engine.settle()
    assert len(parkable(engine.scheduler.table)) == len(list(engine.parked_of_all())) == 1
