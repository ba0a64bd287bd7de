"""Slots are divided by weight between those of one priority who want them, whatever each asks."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from engine.batch import SlotStates
from engine.errors import InvalidRequest
from engine.scheduler import Scheduler
from tests.calls import calls_of
from tests.conftest import MakeRequest
from tests.unit.engine.test_scheduler import complete, make_scheduler, scheduled, step


def held(scheduler: Scheduler) -> Counter[str]:
    """Slots by share."""
    tiers = scheduler._admission.shares.tiers.values()
    return Counter({name: one.owned for tier in tiers for name, one in tier.members.items()})


def park_victims(scheduler: Scheduler) -> int:
    slots = scheduler.victims()
    states = SlotStates(np.zeros((len(slots), 1), np.float32), np.zeros(len(slots), np.int32))
    scheduler.park(slots, states)
    return len(slots)


@pytest.mark.parametrize("n", [1, 7, 200])
def test_shares_that_want_all_get_slots_by_weight(make_request: MakeRequest, n: int) -> None:
    scheduler = make_scheduler(num_slots=40, max_step_rows=40, max_step_tokens=200, max_waiting=999)
    for i in range(200 // n):
        for share, weight in (("one", 1.0), ("three", 3.0)):
            name = f"{share}-{i}"
            scheduler.add(
                make_request(name, [5], n=n, share=share, weight=weight, max_tokens=3 + i % 5)
            )
    for _ in range(9):
        batch = scheduled(scheduler)
        waiting = {share for line in scheduler._admission.lines for share in line.at(0).shares()}
        assert len(waiting) == 2
        assert abs(held(scheduler)["one"] - 10) <= 1 and held(scheduler).total() == 40
        complete(scheduler, batch)


def test_a_giant_request_does_not_hold_up_another_shares_single_one(
    make_request: MakeRequest,
) -> None:
    scheduler = make_scheduler(num_slots=8, max_waiting=2_000_000)
    scheduler.add(make_request("giant", [5], n=1_000_000, share="a", max_tokens=50))
    scheduler.add(make_request("single", [6], share="b", max_tokens=2))
    step(scheduler)
    assert held(scheduler) == {"a": 7, "b": 1}
    assert [output.id for output in step(scheduler)] == ["single"]
    step(scheduler)
    assert held(scheduler) == {"a": 8}
    scheduler.add(make_request("next", [6], share="b", max_tokens=2))
    assert park_victims(scheduler) == 1  # none of the giant's samples ends for long
    step(scheduler)
    assert held(scheduler) == {"a": 7, "b": 1}
    assert [output.id for output in step(scheduler)] == ["next"]


def test_a_poor_share_gets_its_part_and_then_nothing_moves(make_request: MakeRequest) -> None:
    scheduler = make_scheduler(num_slots=8)
    scheduler.add(make_request("rich", [5], n=20, share="a", max_tokens=50))
    for _ in range(3):
        step(scheduler)
    scheduler.add(make_request("poor", [6], n=20, share="b", weight=3, max_tokens=50))
    assert park_victims(scheduler) == 6
    for _ in range(5):
        step(scheduler)
        assert held(scheduler) == {"a": 2, "b": 6}
        assert park_victims(scheduler) == 0


def test_a_share_with_half_of_its_part_waits_for_an_end(make_request: MakeRequest) -> None:
    scheduler = make_scheduler(num_slots=8)
    scheduler.add(make_request("b", [6], n=2, share="b", max_tokens=50))
    scheduler.add(make_request("a", [5], n=20, share="a", max_tokens=50))
    for _ in range(3):
        step(scheduler)
    assert held(scheduler) == {"a": 6, "b": 2}
    scheduler.add(make_request("more", [6], n=2, share="b", max_tokens=50))
    assert park_victims(scheduler) == 0


def test_the_weight_sent_last_is_the_shares(make_request: MakeRequest) -> None:
    scheduler = make_scheduler(num_slots=12, max_step_rows=12, max_waiting=1_000)
    for name, share, weight in (("a", "one", 9), ("b", "two", 1), ("c", "one", 1)):
        scheduler.add(
            make_request(name, [5], n=100, share=share, weight=float(weight), max_tokens=9)
        )
    step(scheduler)
    assert held(scheduler) == {"one": 6, "two": 6}
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(InvalidRequest, match="weight must be above 0"):
            scheduler.add(make_request("d", weight=bad))


def test_with_one_share_requests_are_served_by_arrival(make_request: MakeRequest) -> None:
    scheduler = make_scheduler(num_slots=2)
    for name in "abcd":
        scheduler.add(make_request(name, [5], share="only", max_tokens=1))
    assert [{output.id for output in step(scheduler)} for _ in range(2)] == [{*"ab"}, {*"cd"}]


def calls_of_an_admission(make_request: MakeRequest, waiting: int) -> int:
    """Function calls of a step in which two of so many waiting requests get a slot."""
    scheduler = make_scheduler(num_slots=2, max_waiting=waiting)
    for i in range(waiting):
        share = f"share {i % 8}"
        scheduler.add(make_request(str(i), [5], share=share, max_tokens=1))
    return calls_of(scheduler.schedule)


def test_admission_costs_the_same_however_many_wait(make_request: MakeRequest) -> None:
    calls_of_an_admission(make_request, 16)  # what is done once only
    assert calls_of_an_admission(make_request, 4_000) == calls_of_an_admission(make_request, 16)
