"""What a batch says of decode rows: slot and position, and of the first one in a slot the rest."""

from __future__ import annotations

from typing import Any

import numpy as np

from srm.engine.messages import LEAST_TOP_P
from srm.engine.scheduler.scheduler import Scheduler
from srm.engine.state.sequence import sample_seeds
from srm.engine.steps.batch import FROM_DEVICE, Batch
from tests.kit.engines.making import complete, park_preempted, request_of, scheduled, scheduler_of

HOW: dict[str, Any] = {"temperature": 0.5, "top_k": 7, "top_p": 0.25, "min_p": 0.125}


def list_new_rows(batch: Batch) -> list[tuple[int, int, int]]:
    """Row, slot that is read and token of each new row."""
    return [records[:3] for records in batch.new.tolist()]


def next_batch(scheduler: Scheduler) -> Batch:
    batch = scheduled(scheduler)
    complete(scheduler, batch)
    return batch


def test_only_the_first_row_says_how_its_sequence_samples() -> None:
    scheduler = scheduler_of()
    scheduler.add(request_of("old", [4], max_tokens=20))
    next_batch(scheduler)
    scheduler.add(request_of("new", [5, 6], n=2, seed=3, max_tokens=4, **HOW))
    prefix = int(next_batch(scheduler).prefill["write_slot"][1])
    forks = next_batch(scheduler)
    assert list_new_rows(forks) == [(1, prefix, 6), (2, prefix, 6)]
    seeds = sample_seeds(3, forks.sequence_ids[1:] - 1).tolist()
    sampling = [how[:5] for how in forks.new["sampling"].tolist()]
    assert sampling == [(0.5, 7, 0.25, 0.125, seed) for seed in seeds]
    for _ in range(3):
        batch = next_batch(scheduler)
        assert (batch.num_decode, len(batch.new)) == (3, 0)
    assert next_batch(scheduler).num_decode == 1


def test_whoever_gets_a_slot_again_says_it_anew() -> None:
    scheduler = scheduler_of(num_slots=1)
    asked: list[dict[str, Any]] = [{"temperature": 0}, {"top_p": 0}, HOW]
    for number, how in enumerate(asked):
        scheduler.add(request_of(f"{number}", [5], max_tokens=2, seed=number, **how))
    results = [next_batch(scheduler).new["sampling"].tolist() for _ in range(6)]
    assert [[item[:4] for item in each] for each in results] == [
        *([(0, 0, 1, 0)], []),
        *([(1, 0, np.float32(LEAST_TOP_P), 0)], []),
        *([(0.5, 7, 0.25, 0.125)], []),
    ]
    assert len({each[0][4] for each in results[::2]}) == 3


def test_a_sequence_that_was_parked_says_it_again() -> None:
    scheduler = scheduler_of(num_slots=2)
    scheduler.add(request_of("low", [5], n=2, priority=-1, max_tokens=9, **HOW))
    first = next_batch(scheduler)
    next_batch(scheduler)
    scheduler.add(request_of("high", [6], max_tokens=2))
    assert park_preempted(scheduler) == 1
    ((_, slot, token),) = list_new_rows(next_batch(scheduler))
    assert token == 6
    next_batch(scheduler)
    again = next_batch(scheduler)
    (new,) = again.new
    assert (new["read_slot"], new["token"]) == (again.slots[new["row"]], FROM_DEVICE)
    assert again.positions.tolist().count(2) == 1 == (again.positions[new["row"]] == 2)
    assert new["sampling"] == first.new["sampling"][first.slots == slot]
    assert len(next_batch(scheduler).new) == 0
