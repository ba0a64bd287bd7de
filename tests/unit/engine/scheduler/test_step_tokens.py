"""New tokens of a step; samples that are stopped one by one, or cut off before they start."""

from __future__ import annotations

import numpy as np
import pytest

from srm.engine.messages import REASONS
from srm.engine.scheduler.completion import StepTokens
from srm.engine.scheduler.scheduler import Scheduler
from srm.engine.state.sequence import STREAMS
from srm.errors import InvalidRequest
from tests.kit.engines.making import request_of, scheduler_of, step, steps
from tests.tools.calls import calls_of

LENGTH, ERROR = REASONS.index("length"), REASONS.index("error")


def take_tokens(scheduler: Scheduler) -> StepTokens:
    (step,) = scheduler.take_tokens()
    return step


def stop(scheduler: Scheduler, *indices: int, cut: int | None = None) -> int:
    return scheduler.stop("a", np.array(indices, np.int32), cut)


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


@pytest.mark.parametrize("stream", [-1, STREAMS - 1])
def test_stream_numbers_have_a_range(stream: int) -> None:
    scheduler = scheduler_of()
    scheduler.add(request_of("b", n=2, emit="tokens", stream=STREAMS))  # of another client
    with pytest.raises(InvalidRequest, match="stream must be"):
        scheduler.add(request_of(n=2, emit="tokens", stream=stream))


def calls_of_a_stop(n: int) -> int:
    """Function calls of stopping two of n samples."""
    scheduler = scheduler_of(num_slots=n, max_step_rows=n, max_step_tokens=2 * n, max_waiting=n)
    scheduler.add(request_of(n=n, max_tokens=60))
    steps(scheduler, 2)
    return calls_of(lambda: stop(scheduler, 0, 1))


def test_stopping_two_of_many_costs_what_stopping_two_of_few_does() -> None:
    calls_of_a_stop(3)  # what is done once only
    assert calls_of_a_stop(4_000) == calls_of_a_stop(4)


@pytest.mark.parametrize("at", [0, -3])
def test_a_cut_at_the_beginning_ends_all_samples(at: int) -> None:
    scheduler = scheduler_of(num_slots=4)
    scheduler.add(request_of(prompt=[5], n=9, max_tokens=9))
    steps(scheduler, 2)
    assert stop(scheduler, cut=at) == 9
    assert not scheduler.has_request("a") and scheduler.table.num_free == 4
