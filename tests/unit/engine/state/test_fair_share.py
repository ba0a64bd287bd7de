"""Slots are divided by weight between those of one priority who want them, whatever each asks."""

from __future__ import annotations

from collections import Counter

import pytest

from srm.engine.scheduler.scheduler import Scheduler
from tests.kit.engines.making import (
    complete,
    park_preempted,
    request_of,
    scheduled,
    scheduler_of,
    step,
    steps,
)


def held(scheduler: Scheduler) -> Counter[str]:
    """Slots by share."""
    tiers = scheduler.admission.shares.tiers.values()
    return Counter({name: member.owned for tier in tiers for name, member in tier.members.items()})


@pytest.mark.parametrize("n", [1, 7, 200])
def test_shares_that_want_all_get_slots_by_weight(n: int) -> None:
    scheduler = scheduler_of(num_slots=40, max_step_rows=40, max_step_tokens=200, max_waiting=999)
    for i in range(200 // n):
        for share, weight in (("one", 1.0), ("three", 3.0)):
            of = {"share": share, "weight": weight, "max_tokens": 3 + i % 5}
            scheduler.add(request_of(f"{share}-{i}", [5], n=n, **of))
    for _ in range(9):
        batch = scheduled(scheduler)
        waiting = {
            share for line in scheduler.admission.lines for share in line.get_queue(0).shares()
        }
        assert len(waiting) == 2
        assert abs(held(scheduler)["one"] - 10) <= 1 and held(scheduler).total() == 40
        complete(scheduler, batch)


def test_a_giant_request_does_not_hold_up_another_shares_single_one() -> None:
    scheduler = scheduler_of(max_waiting=2_000_000)
    scheduler.add(request_of("giant", [5], n=1_000_000, share="a", max_tokens=50))
    for num_parked in (0, 1):  # none of the giant's samples ends for long
        scheduler.add(request_of("single", [6], share="b", max_tokens=2))
        assert park_preempted(scheduler) == num_parked
        step(scheduler)
        assert held(scheduler) == {"a": 7, "b": 1}
        assert [output.id for output in step(scheduler)] == ["single"]
        step(scheduler)
        assert held(scheduler) == {"a": 8}


@pytest.mark.parametrize(
    ("there", "comes", "parked", "then"),
    [
        ({"a": (20, 1)}, ("b", 20, 3), 6, {"a": 2, "b": 6}),
        ({"a": (20, 1), "b": (20, 1)}, ("c", 20, 1), 2, {"a": 3, "b": 3, "c": 2}),
        ({"b": (2, 1), "a": (20, 1)}, ("b", 2, 1), 0, {"a": 6, "b": 2}),  # half of its part: waits
    ],
)
def test_a_poor_share_gets_its_part_and_then_nothing_moves(
    there: dict[str, tuple[int, float]],
    comes: tuple[str, int, float],
    parked: int,
    then: dict[str, int],
) -> None:
    scheduler = scheduler_of()
    for share, (n, weight) in there.items():
        scheduler.add(request_of(share, [5], n=n, share=share, weight=weight, max_tokens=50))
    steps(scheduler, 3)
    share, n, weight = comes
    scheduler.add(request_of("below_share", [6], n=n, share=share, weight=weight, max_tokens=50))
    assert park_preempted(scheduler) == parked
    for _ in range(5):
        step(scheduler)
        assert held(scheduler) == then
        assert park_preempted(scheduler) == 0


def test_the_weight_sent_last_is_the_shares() -> None:
    scheduler = scheduler_of(num_slots=12, max_step_rows=12, max_waiting=1_000)
    for name, share, weight in (("a", "one", 9.0), ("b", "two", 1.0), ("c", "one", 1.0)):
        scheduler.add(request_of(name, [5], n=100, share=share, weight=weight, max_tokens=9))
    step(scheduler)
    assert held(scheduler) == {"one": 6, "two": 6}


def test_of_those_who_wait_no_more_are_looked_at_than_are_wanted() -> None:
    scheduler = scheduler_of(num_slots=2)
    for name in "abcde":
        scheduler.add(request_of(name, [5]))
    admission = scheduler.admission
    share = admission.shares.tiers[0].members[""]
    assert [admission.usable(share, limit) for limit in (0, 1, 3, 5, 99)] == [0, 1, 3, 5, 5]
