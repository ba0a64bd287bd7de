"""New tokens of a step; samples that are stopped one by one, or cut off before they start."""

from __future__ import annotations

import numpy as np
import pytest

from srm.engine.messages import REASONS
from srm.engine.scheduler.completion import StepTokens
from srm.engine.scheduler.scheduler import Scheduler
from srm.engine.state.sequence import STREAMS
from srm.errors import InvalidRequest
from tests.kit.engines.making import (
    complete,
    request_of,
    scheduled,
    scheduler_of,
    step,
    steps,
)
from tests.tools.calls import calls_of

LENGTH, ERROR = REASONS.index("length"), REASONS.index("error")


def take_tokens(scheduler: Scheduler) -> StepTokens:
    (step,) = scheduler.take_tokens()
    return step


def stop(scheduler: Scheduler, *indices: int, cut: int | None = None) -> int:
    return scheduler.stop("a", np.array(indices, np.int32), cut)


def ended(scheduler: Scheduler) -> list[int]:
    """Which samples end from here on; nothing is left of the request then."""
    indices = sorted(output.index for output in steps(scheduler))
    assert scheduler.table.num_free == scheduler.table.num_slots
    assert scheduler.num_requests == scheduler.num_waiting == scheduler.waiting_bytes == 0
    assert scheduler.prefixes.num_pinned == 0
    return indices


def test_a_step_says_all_in_tokens() -> None:
    scheduler = scheduler_of()
    scheduler.add(request_of(n=3, prompt=[5], max_tokens=2, emit="tokens", stream=40))
    assert step(scheduler, [11, 12, 13]) == []
    tokens, _, finished = take_tokens(scheduler)
    assert sorted(tokens.owners.tolist()) == [40, 41, 42]
    assert tokens.token_ids.tolist() == [11, 12, 13]
    assert (tokens.reasons.tolist(), finished) == ([0, 0, 0], [])
    assert not len(tokens.logprobs)
    assert step(scheduler, [14, -1, 16]) == []
    tokens, _, finished = take_tokens(scheduler)
    assert (tokens.reasons.tolist(), finished) == ([LENGTH, ERROR, LENGTH], ["a"])
    assert (scheduler.num_requests, scheduler.take_tokens()) == (0, [])
    scheduler.add(request_of(prompt=[5], emit="tokens", logprobs=0))
    scheduler.add(request_of("b", [5], emit="tokens", stream=7))
    step(scheduler)
    assert take_tokens(scheduler).tokens.logprobs.tolist() == [-0.5, -0.5]


def test_tokens_say_what_was_cached_when_a_request_begins_to_sample() -> None:
    scheduler = scheduler_of()
    for name, cached in (("a", []), ("b", [[(9, 2)]])):
        scheduler.add(request_of(name, n=2, max_tokens=2, emit="tokens", stream=9))
        steps(scheduler)
        assert [token.cached for token in scheduler.take_tokens() if token.cached] == cached


def test_tokens_are_split_by_the_bits_above() -> None:
    scheduler = scheduler_of()
    for at, number in enumerate((0, 1, 0, 2)):
        scheduler.add(request_of(f"{at}", [5], emit="tokens", stream=number * STREAMS + at))
    step(scheduler, [21, 22, 23, 24])
    step_tokens = take_tokens(scheduler)
    tokens, split = step_tokens.tokens, dict(step_tokens.split(STREAMS.bit_length() - 1))
    of = dict(zip((tokens.owners % STREAMS).tolist(), tokens.token_ids.tolist(), strict=True))
    assert sorted(of.values()) == [21, 22, 23, 24]
    for number, streams in ((0, [0, 2]), (1, [1]), (2, [3])):
        own = split[number].tokens
        assert sorted(own.owners.tolist()) == streams
        assert own.token_ids.tolist() == [of[stream] for stream in own.owners.tolist()]


@pytest.mark.parametrize("stream", [-1, STREAMS - 1])
def test_stream_numbers_have_a_range(stream: int) -> None:
    scheduler = scheduler_of()
    scheduler.add(request_of("b", n=2, emit="tokens", stream=STREAMS))  # of another client
    with pytest.raises(InvalidRequest, match="stream must be"):
        scheduler.add(request_of(n=2, emit="tokens", stream=stream))


def test_stopped_samples_free_their_slots_at_once_and_say_nothing_more() -> None:
    scheduler = scheduler_of()
    scheduler.add(request_of(n=5, max_tokens=9, emit="tokens"))
    steps(scheduler, 2)
    under_way = scheduled(scheduler)
    assert stop(scheduler, 1, 3, 3, 99, -1) == 2
    assert (scheduler.table.num_free, scheduler.num_requests) == (5, 1)
    assert stop(scheduler, 1, 3) == 0
    scheduler.take_tokens()
    complete(scheduler, under_way)
    assert sorted(take_tokens(scheduler).tokens.owners.tolist()) == [0, 2, 4]
    assert ended(scheduler) == []
    steps_left = [step.tokens for step in scheduler.take_tokens()]
    owners = [tokens.owners[tokens.reasons != 0] for tokens in steps_left]
    assert sorted(np.concatenate(owners).tolist()) == [0, 2, 4]


def calls_of_a_stop(n: int) -> int:
    """Function calls of stopping two of n samples."""
    scheduler = scheduler_of(num_slots=n, max_step_rows=n, max_step_tokens=2 * n, max_waiting=n)
    scheduler.add(request_of(n=n, max_tokens=60))
    steps(scheduler, 2)
    return calls_of(lambda: stop(scheduler, 0, 1))


def test_stopping_two_of_many_costs_what_stopping_two_of_few_does() -> None:
    calls_of_a_stop(3)  # what is done once only
    assert calls_of_a_stop(4_000) == calls_of_a_stop(4)


@pytest.mark.parametrize(
    ("before", "at", "count", "left"),
    [
        (3, 3, 47, [0, 1, 2]),  # 3 runs, 4 … 49 had not started
        (3, 6, 44, [0, 1, 2, 3, 4, 5]),  # more than run
        (0, 2, 48, [0, 1]),  # nothing has begun
        (1, 2, 48, [0, 1]),  # a part of the prompt is fed
        (0, 0, 50, []),
        (1, -3, 50, []),
    ],
)
def test_a_cut_ends_what_runs_and_what_has_not_started(
    before: int, at: int, count: int, left: list[int]
) -> None:
    scheduler = scheduler_of(num_slots=4, max_step_tokens=9)
    scheduler.add(request_of(prompt=range(2, 18) if before < 3 else (5, 6), n=50, max_tokens=9))
    steps(scheduler, before)
    assert stop(scheduler, cut=at) == count
    assert scheduler.num_waiting == max(0, len(left) - (4 if before == 3 else 0))
    assert scheduler.has_request("a") == bool(left)
    assert stop(scheduler, cut=at) == stop(scheduler, cut=40) == 0  # nothing is taken back
    assert ended(scheduler) == left


def test_a_cut_leaves_their_prefix_to_those_that_have_started() -> None:
    scheduler = scheduler_of(num_slots=4, max_step_rows=2, max_step_tokens=9)
    scheduler.add(request_of(n=6, max_tokens=2))
    steps(scheduler, 2)  # two have no row yet
    assert (stop(scheduler, cut=4), scheduler.prefixes.num_pinned) == (2, 1)
    assert ended(scheduler) == [0, 1, 2, 3]
