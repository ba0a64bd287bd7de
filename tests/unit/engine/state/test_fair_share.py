"""Slots are divided by weight between those of one priority who want them, whatever each asks."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from engine.errors import InvalidRequest
from engine.messages import Request
from engine.scheduler.accept import accept
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.wait_queues import ShareLine
from engine.state.fair_share import FairShare, FairShares
from engine.state.sequence import SequenceGroup
from engine.steps.batch import SlotStates
from tests.conftest import MakeRequest
from tests.engines.numpy_runner import TINY
from tests.tools.calls import calls_of
from tests.unit.engine.scheduler.test_scheduler import complete, make_scheduler, scheduled, step


def held(scheduler: Scheduler) -> Counter[str]:
    """Slots by share."""
    tiers = scheduler._admission.shares.tiers.values()
    return Counter({name: one.owned for tier in tiers for name, one in tier.members.items()})


def group_of(request: Request, share: FairShare) -> SequenceGroup:
    group = accept(request, TINY, share.number)
    group.share = share
    return group


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


def test_those_who_give_slots_up_keep_their_parts(make_request: MakeRequest) -> None:
    scheduler = make_scheduler(num_slots=12, max_step_rows=12)
    for token, name in enumerate("ab", 5):
        scheduler.add(make_request(name, [token], n=20, share=name, max_tokens=50))
    for _ in range(3):
        step(scheduler)
    assert held(scheduler) == {"a": 6, "b": 6}
    scheduler.add(make_request("c", [7], n=20, share="c", max_tokens=50))
    assert park_victims(scheduler) == 4
    step(scheduler)
    assert held(scheduler) == {"a": 4, "b": 4, "c": 4}


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


@pytest.mark.parametrize("weight", [5e-324, 0.0, -1.0, 0.000999, 1000.1, np.nan, np.inf, -np.inf])
def test_a_weight_that_no_sum_of_floats_would_notice_is_refused(
    make_request: MakeRequest, weight: float
) -> None:
    scheduler = make_scheduler()
    with pytest.raises(InvalidRequest, match=r"weight must be 0\.001 … 1000, got ") as refused:
        scheduler.add(make_request(weight=weight))
    assert refused.value.param == "weight"


def test_nothing_is_left_of_the_weights_of_those_who_went(make_request: MakeRequest) -> None:
    shares, line, rivals = FairShares(), ShareLine(), (0.1, 1e3, 0.7, 1 / 3, 999.9)
    light = shares.enter(make_request(share="light", weight=1e-3))
    alone = light.weight
    for weight in rivals:
        shares.enter(make_request(share=str(weight), weight=weight))
    members = light.tier.members
    for share in members.values():
        line.push(group_of(make_request(), share))
    shares.weigh(members["0.7"], 0.2)
    assert light.tier.weight == line.weight == sum(one.weight for one in members.values())
    shares.weigh(members["0.7"], 77.7)
    assert light.tier.weight == line.weight == sum(one.weight for one in members.values())
    for weight in rivals:
        share = members[str(weight)]
        for group in list(line.of(share)):
            line.discard(group)
        shares.leave(share)
    assert light.tier.weight == line.weight == light.weight == alone


def test_of_those_who_wait_no_more_are_looked_at_than_are_wanted(make_request: MakeRequest) -> None:
    scheduler = make_scheduler(num_slots=2)
    for name in "abcde":
        scheduler.add(make_request(name, [5]))
    admission = scheduler._admission
    share = admission.shares.tiers[0].members[""]
    assert [admission.usable(share, limit) for limit in (0, 1, 3, 5, 99)] == [0, 1, 3, 5, 5]


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
