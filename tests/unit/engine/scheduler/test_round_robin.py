"""Who is decoded when more sequences run than a step has rows."""

from __future__ import annotations

from collections import Counter

import numpy as np

from srm.engine.scheduler.scheduler import Scheduler
from tests.kit.engines.making import complete, request_of, scheduled, scheduler_of


def served(scheduler: Scheduler) -> Counter[str]:
    """Rows of the next step, by request."""
    batch = scheduled(scheduler)
    first_ids = scheduler.table.first_id[batch.slots].tolist()
    assert batch.is_partial
    counts = Counter(
        scheduler.registry.by_first_id[first_own_id].request.id for first_own_id in first_ids
    )
    complete(scheduler, batch)
    return counts


def test_the_higher_priority_is_served_in_every_step_and_the_rest_in_turn() -> None:
    scheduler = scheduler_of(num_slots=20, max_step_rows=7)
    scheduler.add(request_of("low", [5], n=9, priority=-1, max_tokens=60))
    scheduler.add(request_of("high", [5], n=3, max_tokens=60))
    scheduler.add(request_of("highest", [5], n=2, priority=4, max_tokens=60))
    ids, rows = scheduler.table.sequence_id, Counter[int]()
    for steps in range(1, 30):
        before = scheduler.table.position.copy()
        assert served(scheduler) == {"highest": 2, "high": 3, "low": 2}
        rows.update(np.flatnonzero(scheduler.table.position > before).tolist())
        counts = [rows[slot] for slot in np.flatnonzero((ids >= 0) & (ids < 9)).tolist()]
        assert max(counts) - min(counts) <= 1, f"unfair after {steps} steps"


def test_the_lower_priority_waits_while_the_higher_one_has_all_rows() -> None:
    scheduler = scheduler_of(num_slots=20, max_step_rows=4)
    scheduler.add(request_of("low", [5], n=3, priority=-1, max_tokens=60))
    scheduler.add(request_of("high", [5], n=6, max_tokens=3))
    assert [served(scheduler) for _ in range(5)] == [{"high": 4}] * 4 + [{"high": 2, "low": 2}]


def test_a_turn_ends_where_fewer_run_than_hold_slots() -> None:
    scheduler = scheduler_of(num_slots=9, max_step_rows=6, max_step_tokens=9)
    scheduler.add(request_of("high", [5], n=5, max_tokens=60))
    scheduler.add(request_of("runs", [5], n=2, priority=-1, max_tokens=60))
    for name in ("is fed", "too"):
        scheduler.add(request_of(name, [5] * 60, priority=-1, max_tokens=60))
    assert served(scheduler) == {"high": 5, "runs": 1}
