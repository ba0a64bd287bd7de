"""What the host does for a step grows with neither rows, slots nor queue: calls are counted."""

from __future__ import annotations

from srm.engine.scheduler.round_robin import RoundRobin
from srm.engine.scheduler.scheduler import Scheduler
from tests.kit.engines.making import complete, request_of, scheduler_of
from tests.tools.calls import calls_of

NUM_SLOTS = 16_384


def running_scheduler(n: int) -> Scheduler:
    limits = {"num_slots": NUM_SLOTS, "max_step_rows": NUM_SLOTS, "max_step_tokens": 2 * NUM_SLOTS}
    scheduler = scheduler_of(**limits, max_waiting=NUM_SLOTS)
    scheduler.add(request_of(n=n, max_tokens=60))
    scheduler.schedule()
    return scheduler


def step(scheduler: Scheduler) -> None:
    batch = scheduler.schedule()
    assert batch is not None
    complete(scheduler, batch)


def test_many_samples_cost_what_few_do() -> None:
    few, many = (running_scheduler(n) for n in (2, NUM_SLOTS - 1))
    assert calls_of(lambda: step(many)) <= calls_of(lambda: step(few))  # they start
    assert many.table.num_owned == NUM_SLOTS - 1
    calls = calls_of(lambda: step(many))
    assert calls == calls_of(lambda: step(few)) < 250
    assert calls_of(lambda: few.abort("a")) == calls_of(lambda: many.abort("a"))
    assert many.table.num_free == NUM_SLOTS


def calls_of_turns(num_slots: int) -> int:
    """Function calls of a step whose rows are full, however many slots others hold."""
    scheduler = scheduler_of(num_slots=num_slots, max_step_rows=4, max_waiting=num_slots)
    scheduler.add(request_of("high", [5], n=2, max_tokens=60))
    scheduler.add(request_of("low", [5], n=num_slots - 2, priority=-1, max_tokens=60))
    scheduler.admission.admit()
    shares = scheduler.admission.shares
    return calls_of(lambda: RoundRobin().choose_slots(scheduler.table, shares, 4))


def calls_of_an_admission(waiting: int) -> int:
    """Function calls of a step in which two of so many waiting requests get a slot."""
    scheduler = scheduler_of(num_slots=2, max_waiting=waiting)
    for i in range(waiting):
        scheduler.add(request_of(str(i), [5], share=f"share {i % 8}", max_tokens=1))
    return calls_of(scheduler.schedule)


def test_turns_and_admission_cost_the_same_however_many_there_are() -> None:
    calls_of_turns(40), calls_of_an_admission(16)  # what is done once only
    assert calls_of_turns(4_000) == calls_of_turns(40)
    assert calls_of_an_admission(2_000) == calls_of_an_admission(16)
