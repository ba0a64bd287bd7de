"""Who is decoded when more sequences run than a step has rows."""

from __future__ import annotations

from collections import Counter

import numpy as np

from engine import metrics
from engine.scheduler.scheduler import Scheduler
from engine.state.inter_token_latency import MIXED
from engine.steps.batch import SlotStates
from tests.conftest import MakeRequest
from tests.tools.calls import calls_of
from tests.unit.engine.scheduler.test_scheduler import complete, make_scheduler, scheduled
from tests.unit.engine.state.test_latency import Clocked, Grown


def served(scheduler: Scheduler) -> Counter[str]:
    """Rows of the next step, by request."""
    batch = scheduled(scheduler)
    first_ids = scheduler.table.first_id[batch.write_slots[: batch.num_decode]].tolist()
    assert batch.turn == MIXED
    found = Counter(scheduler._roster.by_first_id[one].request.id for one in first_ids)
    complete(scheduler, batch)
    return found


def test_the_higher_priority_is_served_in_every_step_and_the_rest_in_turn(
    make_request: MakeRequest,
) -> None:
    scheduler = make_scheduler(num_slots=20, max_step_rows=7)
    scheduler.add(make_request("low", [5], n=9, priority=-1, max_tokens=60))
    scheduler.add(make_request("high", [5], n=3, max_tokens=60))
    scheduler.add(make_request("highest", [5], n=2, priority=4, max_tokens=60))
    rows: Counter[int] = Counter()
    for steps in range(1, 30):
        before = scheduler.table.position.copy()
        assert served(scheduler) == {"highest": 2, "high": 3, "low": 2}
        rows.update(np.flatnonzero(scheduler.table.position > before).tolist())
        low = np.flatnonzero(scheduler.table.sequence_id < 9)
        low = low[scheduler.table.sequence_id[low] >= 0]
        counts = [rows[slot] for slot in low.tolist()]
        assert max(counts) - min(counts) <= 1, f"unfair after {steps} steps"


def test_the_lower_priority_waits_while_the_higher_one_has_all_rows(
    make_request: MakeRequest,
) -> None:
    scheduler = make_scheduler(num_slots=20, max_step_rows=4)
    scheduler.add(make_request("low", [5], n=3, priority=-1, max_tokens=60))
    scheduler.add(make_request("high", [5], n=6, max_tokens=3))
    for _ in range(4):
        assert served(scheduler) == {"high": 4}
    assert served(scheduler) == {"high": 2, "low": 2}


def test_waits_between_tokens_are_right_where_steps_are_mixed(make_request: MakeRequest) -> None:
    clocked, grown = Clocked(max_step_rows=3), Grown(metrics.INTER_TOKEN_SECONDS)
    clocked.scheduler.add(make_request("low", [5], n=2, priority=-1, max_tokens=5))
    clocked.step(1.0)  # both of low, for the first time
    clocked.step(1.0)  # and again: 2 x 1
    clocked.scheduler.add(make_request("high", [5], n=2, max_tokens=3))
    clocked.step(1.0)  # high for the first time, one of low: 1 x 1
    clocked.step(1.0)  # high: 2 x 1, the other of low: 1 x 2
    clocked.step(1.0)  # high: 2 x 1, the first of low: 1 x 2
    clocked.step(1.0)  # both of low: 1 + 2
    clocked.latencies.publish(is_idle=True)
    assert grown() == (2 + 1 + 3 + 3 + 2, 2 + 1 + 4 + 4 + 3)


def test_a_sequence_that_was_parked_waited_meanwhile(make_request: MakeRequest) -> None:
    clocked, grown = Clocked(num_slots=1), Grown(metrics.INTER_TOKEN_SECONDS)
    decoded = Grown(metrics.SEQUENCE_DECODE_SECONDS)
    scheduler = clocked.scheduler
    scheduler.add(make_request("low", [5], priority=-1, max_tokens=3))
    clocked.step(1.0)
    clocked.step(1.0)  # 1 x 1
    scheduler.add(make_request("high", [5], max_tokens=2))
    slots = scheduler.victims()
    scheduler.park(slots, SlotStates(np.zeros((1, 1), np.float32), np.zeros(1, np.int32)))
    clocked.step(1.0)  # high, for the first time
    clocked.step(2.0)  # high: 1 x 2
    clocked.step(4.0)  # low: 1 x 7
    clocked.latencies.publish(is_idle=True)
    assert grown() == (3, 10)
    assert decoded() == (2, 2 + 8)


def calls_of_turns(make_request: MakeRequest, num_slots: int) -> int:
    """Function calls of a step whose rows are full, however many slots others hold."""
    scheduler = make_scheduler(num_slots=num_slots, max_step_rows=4, max_waiting=num_slots)
    scheduler.add(make_request("high", [5], n=2, max_tokens=60))
    scheduler.add(make_request("low", [5], n=num_slots - 2, priority=-1, max_tokens=60))
    scheduler._admission.admit()
    return calls_of(lambda: scheduler._turns.take(scheduler.table, scheduler._admission.shares))


def test_turns_cost_the_same_however_many_slots_there_are(make_request: MakeRequest) -> None:
    calls_of_turns(make_request, 40)  # what is done once only
    assert calls_of_turns(make_request, 4_000) == calls_of_turns(make_request, 40)


def test_a_turn_ends_where_fewer_run_than_hold_slots(make_request: MakeRequest) -> None:
    scheduler = make_scheduler(num_slots=9, max_step_rows=6, max_step_tokens=9)
    scheduler.add(make_request("high", [5], n=5, max_tokens=60))
    scheduler.add(make_request("runs", [5], n=2, priority=-1, max_tokens=60))
    scheduler.add(make_request("is fed", [5] * 60, priority=-1, max_tokens=60))
    scheduler.add(make_request("too", [5] * 60, priority=-1, max_tokens=60))
    assert served(scheduler) == {"high": 5, "runs": 1}
