"""Samples that are never to start any more: `StopSamples.cut`."""

from __future__ import annotations

import numpy as np
import pytest

from engine.messages import PROMPT
from engine.scheduler.scheduler import Scheduler
from tests.conftest import MakeEngine, MakeRequest
from tests.unit.engine.scheduler.test_scheduler import make_scheduler, scheduled, step


def cut(scheduler: Scheduler, at: int, *indices: int) -> int:
    return scheduler.stop("a", np.array(indices, np.int32), at)


def ended(scheduler: Scheduler) -> list[int]:
    said = []
    while scheduler.num_requests:
        said += step(scheduler)
    assert scheduler.table.num_free == scheduler.table.num_slots
    assert scheduler.num_waiting == scheduler.waiting_bytes == 0
    assert scheduler.prefixes.num_pinned == 0
    return sorted(output.index for output in said)


def test_a_cut_ends_what_runs_and_what_has_not_started(make_request: MakeRequest) -> None:
    scheduler = make_scheduler(num_slots=4)
    scheduler.add(make_request(n=50, max_tokens=9))
    for _ in range(3):
        step(scheduler)
    assert cut(scheduler, 3, 0) == 48  # 0 and 3 run; 4 … 49 had not started
    assert (scheduler.num_waiting, scheduler.waiting_bytes) == (0, 0)
    assert scheduler.prefixes.num_pinned == 0
    assert cut(scheduler, 3) == 0
    assert cut(scheduler, 40) == 0  # a later one takes nothing back
    assert ended(scheduler) == [1, 2]


def test_a_cut_beyond_what_runs_leaves_some_to_start(make_request: MakeRequest) -> None:
    scheduler = make_scheduler(num_slots=4)
    scheduler.add(make_request(n=50, max_tokens=9))
    for _ in range(3):
        step(scheduler)
    assert cut(scheduler, 6) == 44
    assert scheduler.num_waiting == 2
    assert ended(scheduler) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("steps", [0, 1])
def test_a_cut_comes_before_anything_has_started(make_request: MakeRequest, steps: int) -> None:
    scheduler = make_scheduler(num_slots=4, max_step_tokens=9)
    scheduler.add(make_request(prompt=list(range(2, 18)), n=50, max_tokens=2))
    for _ in range(steps):
        step(scheduler)  # the first part of its prompt
    assert cut(scheduler, 2) == 48
    assert ended(scheduler) == [0, 1]


@pytest.mark.parametrize("at", [0, -3])
def test_a_cut_at_the_first_sample_ends_the_request(make_request: MakeRequest, at: int) -> None:
    scheduler = make_scheduler(num_slots=4)
    scheduler.add(make_request(n=50, max_tokens=9))
    assert scheduler.schedule() is not None
    assert cut(scheduler, at) == 50
    assert not scheduler.has_request("a")
    assert ended(scheduler) == []


def test_a_prefix_is_kept_for_those_who_still_read_it(make_request: MakeRequest) -> None:
    scheduler = make_scheduler(num_slots=4, max_step_rows=2)
    scheduler.add(make_request(n=50, max_tokens=9))
    step(scheduler)
    scheduled(scheduler)  # four hold a slot, two of them forked
    assert cut(scheduler, 4) == 46
    assert scheduler.prefixes.num_pinned == 1
    scheduled(scheduler)
    assert scheduler.prefixes.num_pinned == 0


def test_only_the_samples_left_of_a_scored_prompt_end(
    make_engine: MakeEngine, make_request: MakeRequest
) -> None:
    engine = make_engine()
    engine.add(make_request(prompt=[5, 6, 7], n=5, max_tokens=0, prompt_logprobs=0))
    engine.stop("a", np.array([], np.int32), 2)
    said = []
    while engine.has_work:
        said += engine.step()
    assert [output.index for output in said] == [PROMPT, 0, 1]
