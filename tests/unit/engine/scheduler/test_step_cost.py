"""What a step costs the host does not grow with its rows: calls are counted, not timed."""

from __future__ import annotations

import numpy as np

from engine.config import EngineConfig
from engine.messages import Output
from engine.scheduler.scheduler import Scheduler
from engine.steps.batch import StepResult
from tests.conftest import MakeRequest
from tests.engines.numpy_runner import TINY
from tests.tools.calls import calls_of

NUM_SLOTS = 16_384


def running_scheduler(make_request: MakeRequest, n: int) -> Scheduler:
    config = EngineConfig(
        num_slots=NUM_SLOTS, max_step_rows=NUM_SLOTS, max_step_tokens=2 * NUM_SLOTS
    )
    scheduler = Scheduler(TINY, config)
    scheduler.add(make_request(n=n, max_tokens=60))
    scheduler.schedule()
    return scheduler


def step(scheduler: Scheduler) -> list[Output]:
    batch = scheduler.schedule()
    assert batch is not None
    tokens = np.full(batch.num_decode, 9, np.int32)
    return scheduler.complete(batch, StepResult(tokens, np.zeros(len(tokens), np.float32)))


def test_starting_many_samples_costs_what_starting_few_does(make_request: MakeRequest) -> None:
    few, many = (running_scheduler(make_request, n) for n in (2, NUM_SLOTS - 1))
    assert calls_of(lambda: step(many)) <= calls_of(lambda: step(few))
    assert many.table.num_owned == NUM_SLOTS - 1


def test_a_step_of_many_rows_costs_what_one_of_few_does(make_request: MakeRequest) -> None:
    few, many = (running_scheduler(make_request, n) for n in (2, NUM_SLOTS - 1))
    step(few)
    step(many)
    calls = calls_of(lambda: step(many))
    assert calls == calls_of(lambda: step(few))
    assert calls < 250


def test_aborting_many_samples_costs_what_aborting_few_does(make_request: MakeRequest) -> None:
    few, many = (running_scheduler(make_request, n) for n in (2, NUM_SLOTS - 1))
    step(few)
    step(many)
    assert calls_of(lambda: few.abort("a")) == calls_of(lambda: many.abort("a"))
    assert many.table.num_free == NUM_SLOTS
