"""Samples that are held back until they are let start: in order, and all in the end."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from srm.engine.scheduler.scheduler import Scheduler
from srm.engine.state.sequence import SequenceGroup
from srm.errors import InvalidRequest, Overloaded
from tests.kit.engines.invariants import prefixes_add_up, queues_add_up, slots_add_up
from tests.kit.engines.making import (
    complete,
    park_preempted,
    request_of,
    scheduled,
    scheduler_of,
    step,
    steps,
)

END, OTHER = 4, 9
NONE = np.empty(0, np.int32)


def group_of(scheduler: Scheduler, name: str = "a") -> SequenceGroup:
    return scheduler.registry.by_id[name]


@given(
    first_wave=st.integers(0, 9),
    num_slots=st.integers(1, 40),
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=40),
    prompt=st.sampled_from([[5], [5, 6, 7]]),
    more=st.lists(st.integers(0, 4)),
)
def test_those_start_that_may_and_no_others(
    first_wave: int, num_slots: int, lengths: list[int], prompt: list[int], more: list[int]
) -> None:
    scheduler = scheduler_of(num_slots=num_slots, max_step_rows=64, max_step_tokens=128)
    n, run, below = len(lengths), [0] * len(lengths), first_wave
    request = request_of(
        prompt=prompt, n=n, max_tokens=9, stop_token_ids=(END,), first_wave=first_wave
    )
    scheduler.add(request)
    ended: list[int] = []
    while len(ended) < n:
        assert scheduler.has_work == (len(ended) < min(below, n))
        if (batch := scheduler.schedule()) is not None:
            indices = batch.sequence_ids.tolist()
            for index in indices:
                run[index] += 1
            started = sum(map(bool, run))
            assert all(run[:started]), "not in order"
            assert started == min(n, below, len(ended) + num_slots) or not indices
            tokens = [END if run[index] == lengths[index] else OTHER for index in indices]
            ended += [output.index for output in complete(scheduler, batch, tokens)]
        below += more.pop() if more and scheduler.has_work else 1
        scheduler.start_below("a", below)
        scheduler.start_below("a", below - 1)  # which holds none back
        for adds_up in (slots_add_up, queues_add_up, prefixes_add_up):
            adds_up(scheduler)
    assert sorted(ended) == list(range(n)) and run == lengths
    assert (scheduler.num_requests, scheduler.num_waiting, scheduler.num_left) == (0, 0, n)
    assert scheduler.prefixes.num_pinned == 0 and not scheduler.has_work


def test_a_cut_leaves_what_is_before_it_held_back() -> None:
    scheduler = scheduler_of(num_slots=50)
    scheduler.add(request_of(n=40, max_tokens=9, first_wave=3))
    step(scheduler)
    assert (len(scheduled(scheduler).slots), group_of(scheduler).unstarted) == (3, 37)
    assert scheduler.stop("a", NONE, cut=20) == 20
    scheduled(scheduler)
    assert (group_of(scheduler).unstarted, scheduler.table.num_owned) == (17, 3)
    scheduler.start_below("a", 20)
    scheduled(scheduler)
    assert (group_of(scheduler).unstarted, scheduler.table.num_owned) == (0, 20)
    assert scheduler.prefixes.num_pinned == 1  # until all of them have had a row
    assert scheduler.stop("a", NONE, cut=0) == 20
    assert scheduler.num_requests == 0 and scheduler.num_left == 40


def test_who_is_held_back_takes_no_room_of_the_queue() -> None:
    scheduler = scheduler_of(num_slots=8, max_waiting=20)
    for name in "abc":
        scheduler.add(request_of(name, n=20, max_tokens=9, first_wave=2))
    assert scheduler.num_waiting == 6
    step(scheduler)
    step(scheduler)
    assert (scheduler.num_waiting, scheduler.table.num_owned, scheduler.num_left) == (0, 6, 6)
    assert not scheduler.admission.forking.priorities  # so they are nobody's rivals for slots
    assert len(steps(scheduler)) == 6 and not scheduler.has_work
    for name in "abc":
        scheduler.start_below(name, 20)
    assert len(steps(scheduler)) == 54


@pytest.mark.parametrize("other", [{}, {"share": "other"}, {"priority": 1}, {"priority": -1}])
@pytest.mark.parametrize("names", ["a", "ac"])
def test_who_is_held_back_gives_up_its_prompts_state(
    names: str, other: dict[str, str | int]
) -> None:
    """Also one that two have, for whoever waits: that one may decide what else starts."""
    scheduler = scheduler_of(num_slots=8, prefix_slots=1)
    for name in names:
        scheduler.add(request_of(name, n=9, max_tokens=9, first_wave=2))
    for _ in range(3):
        step(scheduler)
    assert scheduler.prefixes.num_pinned == 1 and group_of(scheduler).unstarted == 7
    scheduler.add(request_of("b", [8, 9, 10], n=2, max_tokens=2, **other))
    outputs = [output for _ in range(3) for output in step(scheduler)]
    assert [output.id for output in outputs] == ["b", "b"], "it waited for others to end"
    for name in names:
        scheduler.start_below(name, 9)
    assert len(steps(scheduler)) == 9 * len(names)


def test_what_is_parked_still_runs() -> None:
    """The group starts no others meanwhile, and goes on when it is resumed."""
    scheduler = scheduler_of(num_slots=4)
    scheduler.add(request_of("a", n=9, max_tokens=4, first_wave=4))
    step(scheduler)
    step(scheduler)
    scheduler.add(request_of("b", n=4, max_tokens=2, priority=1))
    step(scheduler)
    assert park_preempted(scheduler) == 4
    queues_add_up(scheduler)
    outputs = steps(scheduler)
    assert [output.id for output in outputs] == ["b"] * 4 + ["a"] * 4
    scheduler.start_below("a", 9)
    outputs += steps(scheduler)
    assert [output.index for output in outputs[4:]] == list(range(9))


def test_who_is_held_back_has_a_part_of_the_waiting_bytes_only() -> None:
    """Also if none of its samples may start."""
    scheduler = scheduler_of(num_slots=8, max_waiting_bytes=4_000)
    with pytest.raises(Overloaded, match="of at most 4000 bytes are waiting"):
        for number in range(1_000):
            scheduler.add(request_of(str(number), n=9, max_tokens=9, first_wave=0, share="a"))
    scheduler.add(request_of("other", n=9, max_tokens=9, share="b"))


@pytest.mark.parametrize("prompt", [[5], [5, 6, 7]])
def test_what_is_sent_again_while_it_is_held_back_begins_anew(prompt: list[int]) -> None:
    scheduler = scheduler_of(num_slots=8)
    request = request_of("a", prompt, n=9, max_tokens=3, first_wave=2, durable=True)
    scheduler.add(request)
    assert len(steps(scheduler)) == 2 and not scheduler.has_work
    scheduler.add(request)  # its sender died before it could let more start
    queues_add_up(scheduler)
    assert [output.index for output in steps(scheduler)] == [0, 1]
    scheduler.start_below("a", 9)
    assert len(steps(scheduler)) == 7


def test_a_first_wave_below_none_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="first_wave must be at least 0, got -1"):
        scheduler_of().add(request_of(first_wave=-1))
