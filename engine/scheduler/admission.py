"""Admission: who gets the slots that are free, and who may have those of others.

Three lines want slots: groups whose prompts are to be prefilled, groups whose samples can start,
and groups with parked samples. The next slot goes to the highest priority, in it to the share with
the least load, in it to the earliest group, of which parked samples come first. Pure. Keeps: while
others of its priority wait, a share gets no more slots at once than bring it near its part.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from engine.scheduler.parking import Parking
from engine.scheduler.prefill import Prefill
from engine.scheduler.wait_queues import FairLine
from engine.state.fair_share import FairShare, FairShares
from engine.state.latency import Latencies
from engine.state.prefixes import NO_SLOT, Order, Prefixes
from engine.state.sequence import SequenceGroup
from engine.state.slots import SlotTable, StopSets
from engine.steps.batch import I32, I64, SlotStates


@dataclass(slots=True, eq=False)
class Admission:
    """The lines of those who want slots."""

    table: SlotTable
    stop_sets: StopSets
    prefixes: Prefixes
    parking: Parking
    latencies: Latencies
    max_tokens: int
    shares: FairShares = field(default_factory=FairShares)
    num_waiting: int = 0  # sequences accepted and not started
    waiting_bytes: int = 0  # of requests that have sequences to start
    waiting: FairLine = field(default_factory=FairLine)  # for a slot to prefill into
    forking: FairLine = field(default_factory=FairLine)  # prefilled, for slots to start in
    prefill: Prefill = field(init=False)
    is_held: bool = False  # only what is parked gets slots
    _waiting_at: Counter[int] = field(default_factory=Counter)  # of num_waiting, by priority
    _resumed: list[tuple[I64, SlotStates]] = field(default_factory=list)
    _rivals: tuple[FairLine, ...] = field(init=False)  # those that can use a slot now

    def __post_init__(self) -> None:
        self.prefill = Prefill(self.prefixes, self.waiting)
        self._rivals = self.lines

    @property
    def lines(self) -> tuple[FairLine, FairLine, FairLine]:
        """All lines that want slots."""
        return self.parking.line, self.forking, self.waiting

    @property
    def room(self) -> int:
        """Tokens of further prompts that the next steps can take."""
        return self.max_tokens - self.prefill.num_tokens

    def enter(self, group: SequenceGroup) -> None:
        """Accept a group: those of its sequences that are to start wait for slots."""
        group.share = self.shares.enter(group.request)
        if group.unstarted:
            self.waiting.push(group)
            self._count_waiting(group, group.unstarted)
            self.waiting_bytes += group.num_bytes

    def waiting_before(self, priority: int) -> int:
        """Number of waiting sequences of this priority or a higher one."""
        return sum(count for own, count in self._waiting_at.items() if own >= priority)

    def leave(self, group: SequenceGroup) -> None:
        """Take the group out of everything and free its slots at once."""
        for line in (self.waiting, self.forking):
            line.discard(group)
        self.prefill.drop(group)
        self.parking.drop(group, self.parking.indices(group))
        self._count_waiting(group, -group.unstarted)
        if group.unstarted:
            self.waiting_bytes -= group.num_bytes
        slots = group.slots[: group.reach]
        sequence_ids = group.first_id + np.arange(len(slots))
        owned = slots[self.table.sequence_id[slots] == sequence_ids]
        self.table.free(owned)
        self.shares.own(group.share, -len(owned))

    def start_no_more(self, group: SequenceGroup, count: int) -> None:
        """Drop the last `count` of the sequences that a group has yet to start."""
        group.to_start -= count
        self._count_waiting(group, -count)
        if not group.unstarted:
            self.waiting_bytes -= group.num_bytes
            self.waiting.discard(group)
            self.forking.discard(group)
            if not group.unforked:
                self.prefill.drop(group)

    def begin_again(self, group: SequenceGroup) -> I64:
        """Start anew all samples that neither hold a slot nor are parked; return the others."""
        indices = np.arange(group.request.params.n)
        slots = group.slots[: group.reach]
        runs = np.flatnonzero(
            self.table.sequence_id[slots] == group.first_id + np.arange(len(slots))
        )
        others = np.concatenate([runs, self.parking.indices(group)])
        was_unstarted = group.unstarted
        group.start_anew(np.setdiff1d(indices, others))
        self._count_waiting(group, group.unstarted - was_unstarted)
        if was_unstarted or not group.unstarted:
            return others
        self.waiting_bytes += group.num_bytes
        if group.unforked:
            self.forking.push(group)
            return others
        group.prefilled, group.cached, group.state_slot = 0, 0, NO_SLOT
        group.prefix, group.awaited = None, None
        group.fills.clear()
        self.waiting.push(group)
        return others

    def prefill_again(self, group: SequenceGroup) -> None:
        """Feed a group's prompt again, for the sequences that it has yet to start."""
        self.forking.discard(group)
        self.prefill.forget(group)
        self.waiting.push(group)

    def admit(self) -> None:
        """Give free slots out, in serving order."""
        room = self.room
        while (found := self._next(room)) is not None:
            line, group = found
            line.discard(group)
            if group.stop_row < 0:
                group.stop_row = self.stop_sets.acquire(group.stop_ids)
            if line is self.parking.line:
                self._resume(group)
                continue
            if group.num_unprefilled and not self.prefill.begin(group):
                continue
            if group.taken_up is None:
                self.latencies.take_up(group)
            if group.num_unprefilled:
                self._begin_prefill(group)
                room -= group.num_unprefilled
            else:
                self._start(group)

    def take_resumed(self) -> list[tuple[I64, SlotStates]]:
        """Take what is to be written to which slots before the next step."""
        resumed, self._resumed = self._resumed, []
        return resumed

    def count_forks(self, group: SequenceGroup, count: int) -> None:
        """Note that `count` of its sequences have read the prefix; the last one releases it."""
        group.unforked -= count
        if count and not group.unforked and not group.unstarted:
            self.prefill.release(group)

    def may_displace(self, share: FairShare) -> bool:
        """Whether others, of lower priority or with far more slots, may have to give it slots."""
        priority = share.tier.priority
        return min(self.shares.owning, default=priority) < priority or self.is_poor(share)

    def is_poor(self, share: FairShare) -> bool:
        """Whether it holds less than half of its part of what its priority has."""
        return 2 * share.owned < self.part(share) and self.part(share) >= share.owned + 1

    def part(self, share: FairShare) -> float:
        """Slots that would be its own if its priority's slots were divided by weight."""
        tier = share.tier
        return (tier.owned + self.table.num_free) * share.weight / tier.weight

    def usable(self, share: FairShare, limit: int) -> int:
        """Count the slots its sequences could use now; stops at about `limit`."""
        priority, count = share.tier.priority, share.parked
        count += sum(group.unstarted for group in self.forking.at(priority).of(share))
        room, prefixes = self.room, self.prefixes.num_available
        head = self.waiting.peek()
        if head is None or self._is_blocked(head, room):
            return count
        for group in self.waiting.at(priority).of(share):
            if count >= limit or self._is_blocked(group, room):
                break
            if not group.num_unprefilled:
                count += group.unstarted
            elif not group.needs_prefix:
                count += 1
            elif prefixes:
                prefixes -= 1  # it needs no slot yet
            else:
                break
            room -= group.num_unprefilled
        return count

    def _next(self, room: int) -> tuple[FairLine, SequenceGroup] | None:
        """Return who gets the next free slot, and the line it is in."""
        free, best = self.table.num_free, None
        if self.is_held:
            parked = self.parking.line.peek()
            return (self.parking.line, parked) if parked is not None and free else None
        waiting = self.waiting.peek()
        self._rivals = self.lines
        if waiting is not None and self._is_blocked(waiting, room):
            waiting, self._rivals = None, self._rivals[:2]
        if not free:
            # A prompt that needs no slot of its own is fed before its samples displace others.
            if waiting is None or not waiting.num_unprefilled or not waiting.needs_prefix:
                return None
            return (self.waiting, waiting) if self.may_displace(waiting.share) else None
        for line, group in (
            (self.parking.line, self.parking.line.peek()),
            (self.forking, self.forking.peek()),
            (self.waiting, waiting),
        ):
            if group is not None and (best is None or _urgency(group) > _urgency(best[1])):
                best = line, group
        return best

    def _is_blocked(self, group: SequenceGroup, room: int) -> bool:
        """Whether a waiting group would leave a slot idle if it got one."""
        if not group.num_unprefilled:
            return False
        # A slot taken before the next batches can prefill into it would only stand idle.
        return room <= 0 or (group.needs_prefix and not self.prefixes.num_available)

    def _begin_prefill(self, group: SequenceGroup) -> None:
        if not group.needs_prefix:
            slots = self.table.take(group, 1)
            group.slot = int(slots[0])
            self._count_started(group, slots)
        self.prefill.push(group)

    def _start(self, group: SequenceGroup) -> None:
        """Start sequences of a prefilled group, as many as its share is to have now."""
        count = min(group.unstarted, self._portion(group))
        if count:
            slots = self.table.take(group, count)
            self.table.is_running[slots] = True
            self._count_started(group, slots)
        if group.unstarted:
            self.forking.push(group)

    def _resume(self, group: SequenceGroup) -> None:
        """Give slots to parked sequences of a group, as many as its share is to have now."""
        if group.taken_up is None:
            self.latencies.take_up(group)
        portion = self._portion(group)
        while portion and self.parking.holds(group):
            parked, times = self.parking.take(group, portion)
            slots = self.table.take_back(group, parked)
            self.table.is_running[slots] = True
            group.remember(parked.indices, slots)
            self.latencies.resume(slots, times)
            self.shares.own(group.share, len(slots))
            self._resumed.append((slots.astype(np.int64), parked.states))
            portion -= len(slots)
        if self.parking.holds(group):
            self.parking.line.push(group)

    def _portion(self, group: SequenceGroup) -> int:
        """Free slots that the group may have at once: all if nobody else waits, else about half of
        its part, since nobody knows how many the others can use."""
        free, share = self.table.num_free, group.share
        others = 0
        for line in self._rivals:
            rivals = line.at(share.tier.priority)
            if len(rivals) > (share in rivals):
                others += rivals.weight - (share.weight if share in rivals else 0)
        if not others:
            return free
        return min(free, math.ceil(free * share.weight / (share.weight + others) / 2))

    def _count_waiting(self, group: SequenceGroup, more: int) -> None:
        priority = group.request.priority
        self.num_waiting += more
        self._waiting_at[priority] += more
        if not self._waiting_at[priority]:
            del self._waiting_at[priority]

    def _count_started(self, group: SequenceGroup, slots: I32) -> None:
        self.latencies.start(group, slots)
        group.start(slots)
        self._count_waiting(group, -len(slots))
        self.shares.own(group.share, len(slots))
        if not group.unstarted:
            self.waiting_bytes -= group.num_bytes
        if group.prefix is not None:
            group.unforked += len(slots)


def _urgency(group: SequenceGroup) -> tuple[int, float, int, Order]:
    """Sort key: the largest is served first."""
    share = group.share
    return (share.tier.priority, -share.load, -share.number, group.order)
