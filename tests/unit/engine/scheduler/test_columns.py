"""New tokens as columns, and samples that are stopped one by one."""

from __future__ import annotations

import numpy as np
import pytest

from engine.errors import InvalidRequest
from engine.messages import REASONS, Columns
from engine.scheduler.outputs import NewTokens
from engine.scheduler.scheduler import Scheduler
from engine.state.sequence import STREAMS
from tests.conftest import MakeEngine, MakeRequest
from tests.tools.calls import calls_of
from tests.unit.engine.scheduler.test_scheduler import complete, make_scheduler, scheduled, step

LENGTH, ERROR = REASONS.index("length"), REASONS.index("error")


def taken(scheduler: Scheduler) -> NewTokens:
    (columns,) = scheduler.take_columns()
    return columns


def test_a_step_says_all_in_columns(make_request: MakeRequest) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request(n=3, prompt=[5], max_tokens=2, emit="columns", stream=40))
    assert step(scheduler, [11, 12, 13]) == []
    columns = taken(scheduler)
    assert sorted(columns.streams.tolist()) == [40, 41, 42]
    assert columns.token_ids.tolist() == [11, 12, 13]
    assert (columns.reasons.tolist(), columns.finished) == ([0, 0, 0], [])
    assert not len(columns.logprobs)
    assert step(scheduler, [14, -1, 16]) == []
    columns = taken(scheduler)
    assert columns.reasons.tolist() == [LENGTH, ERROR, LENGTH]
    assert columns.finished == ["a"]
    assert scheduler.num_requests == 0
    assert scheduler.take_columns() == []


def test_columns_carry_logprobs_where_somebody_asks(make_request: MakeRequest) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request(prompt=[5], emit="columns", logprobs=0))
    scheduler.add(make_request("b", prompt=[5], emit="columns", stream=7))
    step(scheduler)
    assert taken(scheduler).logprobs.tolist() == [-0.5, -0.5]


def test_columns_say_what_was_cached_when_a_request_begins_to_sample(
    make_request: MakeRequest,
) -> None:
    scheduler = make_scheduler()
    for name, cached in (("a", []), ("b", [(9, 2)])):
        scheduler.add(make_request(name, n=2, max_tokens=2, emit="columns", stream=9))
        while scheduler.num_requests:
            step(scheduler)
        said = [columns.cached for columns in scheduler.take_columns()]
        assert [pairs for pairs in said if pairs] == ([cached] if cached else [])


def test_columns_are_split_by_the_bits_above(make_request: MakeRequest) -> None:
    scheduler = make_scheduler()
    for number in (0, 1, 0, 2):
        name = f"{number}-{scheduler.num_requests}"
        stream = number * STREAMS + scheduler.num_requests
        scheduler.add(make_request(name, prompt=[5], emit="columns", stream=stream))
    step(scheduler, [21, 22, 23, 24])
    parts = dict(taken(scheduler).split(STREAMS.bit_length() - 1))

    def said(columns: Columns) -> dict[int, int]:
        streams = np.frombuffer(columns.streams, "<i8").tolist()
        tokens = np.frombuffer(columns.token_ids, "<i4").tolist()
        return dict(zip(streams, tokens, strict=True))

    assert {number: sorted(said(part)) for number, part in parts.items()} == {
        0: [0, 2],
        1: [1],
        2: [3],
    }
    assert sorted(token for part in parts.values() for token in said(part).values()) == [
        *range(21, 25)
    ]


@pytest.mark.parametrize("stream", [-1, STREAMS, STREAMS - 1])
def test_stream_numbers_have_a_range(make_request: MakeRequest, stream: int) -> None:
    scheduler = make_scheduler()
    if stream == STREAMS:  # of another client, and good
        scheduler.add(make_request(n=2, emit="columns", stream=stream))
        return
    with pytest.raises(InvalidRequest, match="stream must be"):
        scheduler.add(make_request(n=2, emit="columns", stream=stream))


def stop(scheduler: Scheduler, *indices: int) -> int:
    return scheduler.stop("a", np.array(indices, np.int32))


def test_stopped_samples_free_their_slots_at_once_and_say_nothing_more(
    make_request: MakeRequest,
) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request(n=5, max_tokens=9, emit="columns"))
    step(scheduler)
    step(scheduler)
    under_way = scheduled(scheduler)
    assert stop(scheduler, 1, 3, 3, 99, -1) == 2
    assert (scheduler.table.num_free, scheduler.num_requests) == (5, 1)
    assert stop(scheduler, 1, 3) == 0
    scheduler.take_columns()
    complete(scheduler, under_way)
    assert sorted(taken(scheduler).streams.tolist()) == [0, 2, 4]
    while scheduler.num_requests:
        step(scheduler)
    ended = [one.streams[one.reasons != 0].tolist() for one in scheduler.take_columns()]
    assert sorted(stream for streams in ended for stream in streams) == [0, 2, 4]
    assert scheduler.table.num_free == scheduler.table.num_slots
    assert scheduler.prefixes.num_pinned == 0


def test_slots_of_stopped_samples_go_to_those_that_wait(make_request: MakeRequest) -> None:
    scheduler = make_scheduler(num_slots=3)
    scheduler.add(make_request(n=6, max_tokens=30))
    for _ in range(3):
        step(scheduler)
    assert stop(scheduler, 0, 2, 4) == 2  # 4 holds no slot yet
    step(scheduler)
    assert scheduler.num_waiting == 1
    said = []
    while scheduler.num_requests:
        said += step(scheduler)
    assert sorted(output.index for output in said) == [1, 3, 4, 5]


def test_when_the_last_sample_is_stopped_the_request_is_over(make_request: MakeRequest) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request(n=3, max_tokens=9))
    step(scheduler)
    step(scheduler)
    assert stop(scheduler, 0) == 1
    assert stop(scheduler, 1, 2) == 2
    assert not scheduler.has_request("a")
    assert scheduler.schedule() is None
    assert scheduler.prefixes.num_pinned == 0
    assert stop(scheduler, 1) == 0


def test_samples_stopped_before_their_first_step_let_go_of_the_prefix(
    make_request: MakeRequest,
) -> None:
    scheduler = make_scheduler(max_step_rows=2)  # so that others wait for their turn
    scheduler.add(make_request(n=4, max_tokens=9))
    step(scheduler)
    step(scheduler)
    assert scheduler.prefixes.num_pinned == 1
    started = scheduler.table.sequence_id[
        (scheduler.table.sequence_id >= 0)
        & (scheduler.table.position == scheduler.table.first_position)
    ].tolist()
    assert len(started) == 2
    assert stop(scheduler, *started) == 2
    assert scheduler.prefixes.num_pinned == 0
    while scheduler.num_requests:
        step(scheduler)
    assert scheduler.table.num_free == scheduler.table.num_slots


def calls_of_a_stop(make_request: MakeRequest, n: int) -> int:
    """Function calls of stopping two of n samples."""
    scheduler = make_scheduler(n, n, 2 * n, max_waiting=n)
    scheduler.add(make_request(n=n, max_tokens=60))
    step(scheduler)
    step(scheduler)
    stopped: list[int] = []
    calls = calls_of(lambda: stopped.append(stop(scheduler, 0, 1)))
    assert stopped == [2]
    return calls


def test_stopping_two_of_many_costs_what_stopping_two_of_few_does(
    make_request: MakeRequest,
) -> None:
    calls_of_a_stop(make_request, 3)  # what is done once only
    assert calls_of_a_stop(make_request, 4_000) == calls_of_a_stop(make_request, 4)


def test_metrics_count_what_was_stopped(make_engine: MakeEngine, make_request: MakeRequest) -> None:
    engine = make_engine()
    engine.add(make_request(n=3, max_tokens=9, emit="columns"))
    engine.step()
    engine.step()
    engine.stop("a", np.array([0, 2], np.int32))
    status = engine.status()
    assert (status.running, status.waiting) == (1, 0)
    engine.stop("a", np.array([1], np.int32))
    assert not engine.has_work
    engine.stop("a", np.array([1], np.int32))  # unknown by now
