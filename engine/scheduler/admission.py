"""Admission: who gets the slots that are free, and who may have those of others.

Three lines want slots: groups whose prompts are to be prefilled, groups whose samples can start,
and groups with parked samples. The next slot goes to the highest priority, in it to the share with
the least load, in it to the group of the highest precedence and the earliest of these, of which
parked samples come first. Pure. Keeps: while others of its priority wait, a share gets no more
slots at once than bring it near its part, and cannot keep all states of prompts to itself.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np

from srm.engine.messages import MAX_PRIORITY
from srm.engine.scheduler.parking import Parking
from srm.engine.scheduler.prefill import Prefill
from srm.engine.scheduler.refeed import Refeed
from srm.engine.scheduler.wait_queues import FairQueue
from srm.engine.state.fair_share import FairShare, FairShares, add_to
from srm.engine.state.latency import Latencies
from srm.engine.state.prefixes import NO_SLOT, Order, Prefixes
from srm.engine.state.sequence import SequenceGroup
from srm.engine.state.slots import SlotTable, StopSets
from srm.engine.steps.batch import I32, I64, SlotStates

EVERY = -MAX_PRIORITY - 1
"""A precedence that all others are above."""


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
    num_waiting: int = 0  # sequences accepted and not started that may start now
    num_left: int = 0  # sequences that ever started, or were dropped before
    waiting_bytes: int = 0  # of requests that have sequences to start
    waiting: FairQueue = field(default_factory=FairQueue)  # for a slot to prefill into
    forking: FairQueue = field(default_factory=FairQueue)  # prefilled, for slots to start in
    paced: dict[SequenceGroup, None] = field(default_factory=dict)
    """Groups in no line: none of those left may start yet."""
    prefill: Prefill = field(init=False)
    refeed: Refeed = field(init=False)
    prepared: list[SequenceGroup] = field(default_factory=list)
    """Groups that want the state of their prompt alone. It is there after the next step."""
    is_held: bool = False  # only what is parked gets slots
    _yielding: SequenceGroup | None = None  # gives up its prefix when none of its rows needs it
    _waiting_at: Counter[int] = field(default_factory=Counter)  # of num_waiting, by priority
    _resumed: list[tuple[I64, SlotStates]] = field(default_factory=list)
    _rivals: tuple[FairQueue, ...] = field(init=False)  # those that can use a slot now

    def __post_init__(self) -> None:
        self.prefill = Prefill(self.prefixes, self.waiting)
        self.refeed = Refeed(self.table)
        self._rivals = self.lines

    @property
    def lines(self) -> tuple[FairQueue, FairQueue, FairQueue]:
        """All lines that want slots."""
        return self.parking.line, self.forking, self.waiting

    @property
    def room(self) -> int:
        """Tokens of further prompts that the next steps can take."""
        return self.max_tokens - self.prefill.num_tokens - self.refeed.num_tokens

    def enter(self, group: SequenceGroup) -> None:
        """Accept a group: those of its sequences that are to start wait for slots."""
        group.share = self.shares.enter(group.request)
        if group.unstarted:
            self.line_up(self.waiting, group)
            self._count_waiting(group, group.startable)
            self._count_bytes(group, group.num_bytes)

    def line_up(self, line: FairQueue, group: SequenceGroup) -> None:
        """Put a group in a line; or aside, while none of its sequences may start."""
        if group.startable:
            line.push(group)
        else:
            self.paced[group] = None

    def start_below(self, group: SequenceGroup, index: int) -> None:
        """Let the sequences of a group before this index start."""
        group.start_below = max(group.start_below, index)
        self._go_on(group)

    def _go_on(self, group: SequenceGroup) -> None:
        """Count what of a group may start, and put it in a line where it was aside."""
        self._count_waiting(group, group.startable)
        if group in self.paced and group.startable:
            del self.paced[group]
            (self.waiting if group.num_unprefilled else self.forking).push(group)

    def waiting_before(self, priority: int) -> int:
        """Number of waiting sequences of this priority or a higher one."""
        return sum(count for own, count in self._waiting_at.items() if own >= priority)

    def has_part(self, share: FairShare | None, more: int, limit: int) -> bool:
        """Whether a share, None for a new one, of which `more` bytes are to wait holds its part of
        `limit` at most; the first of its requests may be larger."""
        if share is None or not share.waiting_bytes:
            return True
        tiers = self.shares.tiers.values()
        waiting = sum(other.waiting_bytes > 0 for tier in tiers for other in tier.members.values())
        return share.waiting_bytes + more <= limit // waiting

    def leave(self, group: SequenceGroup) -> None:
        """Take the group out of everything and free its slots at once."""
        for line in (self.waiting, self.forking):
            line.discard(group)
        self.paced.pop(group, None)
        if group is self._yielding:
            self._yielding = None
        self.prefill.drop(group)
        self.parking.drop(group, self.parking.indices(group))
        self._count_waiting(group, 0)
        self.num_left += group.unstarted
        if group.unstarted:
            self._count_bytes(group, -group.num_bytes)
        slots = group.slots[: group.reach]
        sequence_ids = group.first_id + np.arange(len(slots))
        owned = slots[self.table.sequence_id[slots] == sequence_ids]
        self.table.free(owned)
        self.shares.own(group.share, group.request.precedence, -len(owned))

    def start_no_more(self, group: SequenceGroup, count: int) -> None:
        """Drop the last `count` of the sequences that a group has yet to start."""
        group.to_start -= count
        self._count_waiting(group, group.startable)
        self.num_left += count
        if not group.unstarted:
            self._count_bytes(group, -group.num_bytes)
            self.waiting.discard(group)
            self.forking.discard(group)
            self.paced.pop(group, None)
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
        self._go_on(group)
        if was_unstarted or not group.unstarted:
            return others
        self._count_bytes(group, group.num_bytes)
        if group.unforked:
            self.line_up(self.forking, group)
            return others
        group.prefilled, group.state_slot = 0, NO_SLOT
        group.prefix, group.awaited = None, None
        group.fills.clear()
        self.line_up(self.waiting, group)
        return others

    def prefill_again(self, group: SequenceGroup) -> None:
        """Feed a group's prompt again, for the sequences that it has yet to start."""
        self.forking.discard(group)
        self.prefill.forget(group)
        self.line_up(self.waiting, group)

    def feed_again(self, group: SequenceGroup) -> None:
        """Feed again all of a group that is under way: prompts from their first token on, and what
        its sequences in slots have sampled."""
        if group.taken_up is None:
            return
        table, slots = self.table, group.slots[: group.reach].astype(np.int64)
        slots = slots[table.sequence_id[slots] == group.first_id + np.arange(len(slots))]
        runs = slots[table.is_running[slots]]
        is_fed_in_slot = len(runs) < len(slots)  # the prompt of its only sequence
        if group is self._yielding:
            self._yielding = None
        unforked = table.unforked(slots)
        table.first_read[unforked] = unforked
        self.count_forks(group, len(unforked))
        if is_fed_in_slot or group.unstarted:
            self.forking.discard(group)
            self.waiting.discard(group)
            self.prefill.drop(group)
            self.prefill.forget(group)
            if is_fed_in_slot:
                self.prefill.push(group)
            else:
                self.line_up(self.waiting, group)
        self.refeed.begin(group, runs)

    def admit(self) -> None:
        """Give free slots out, in serving order."""
        if self.num_waiting:
            self._divide_prefixes()
        room = self.room
        while (candidate := self._next(room)) is not None:
            line, group = candidate
            line.discard(group)
            if line is self.parking.line:
                self._resume(group)
            else:
                room -= self._take_up(group)

    def take_resumed(self) -> list[tuple[I64, SlotStates]]:
        """Take what is to be written to which slots before the next step."""
        resumed, self._resumed = self._resumed, []
        given, self.prefill.given = self.prefill.given, []
        for slot, state in given:
            states = SlotStates(np.frombuffer(state, np.float32)[None], np.zeros(1, np.int32))
            resumed.append((np.array([slot], np.int64), states))
        return resumed

    def count_forks(self, group: SequenceGroup, count: int) -> None:
        """Note that `count` of its sequences have read the prefix; the last one releases it."""
        group.unforked -= count
        if count and not group.unforked and not group.unstarted:
            self.prefill.release(group)
        if group is self._yielding:
            self._yield()

    def may_displace(self, share: FairShare) -> bool:
        """Whether others, of lower priority or with far more slots, may have to give it slots."""
        priority = share.tier.priority
        return min(self.shares.owning, default=priority) < priority or self.is_below_share(share)

    def is_below_share(self, share: FairShare) -> bool:
        """Whether it holds less than half of its part of what its priority has."""
        return self.holds_little(share) and self.part(share) >= share.owned + 1

    def holds_little(self, share: FairShare) -> bool:
        """Whether it does, though its part may be no whole slot: so do all with less load."""
        return 2 * share.owned < self.part(share)

    def part(self, share: FairShare) -> float:
        """Slots that would be its own if its priority's slots were divided by weight."""
        tier = share.tier
        return (tier.owned + self.table.num_free) * share.weight / tier.weight

    def usable(self, share: FairShare, limit: int, above: int = EVERY) -> int:
        """Count the slots its sequences, those of a precedence above `above`, could use now; stops
        at about `limit`."""
        priority = share.tier.priority
        count = share.parked if above == EVERY else self.parking.count(share, above)
        forking = self.forking.get_queue(priority).list_groups(share)
        count += sum(group.startable for group in takewhile(_precede(above), forking))
        room, prefixes = self.room, self.prefixes.num_available
        for group in takewhile(
            _precede(above), self.waiting.get_queue(priority).list_groups(share)
        ):
            if count >= limit or self._is_blocked(group, room):
                break
            if not group.num_unprefilled:
                count += 0 if group.request.returns_state else group.startable
            elif not group.needs_prefix:
                count += 1
            elif prefixes:
                prefixes -= 1  # it needs no slot yet
            else:
                break
            room -= group.num_unprefilled
        return count

    def _next(self, room: int) -> tuple[FairQueue, SequenceGroup] | None:
        """Return who gets the next free slot, and the line it is in."""
        free, best = self.table.num_free, None
        if self.is_held:
            parked = self.parking.line.peek()
            return (self.parking.line, parked) if parked is not None and free else None
        waiting = self.waiting.peek()
        self._rivals = self.lines
        if waiting is not None and self._is_blocked(waiting, room):
            # It waits for the state of a prompt, and not all others need one.
            heads = self.waiting.heads() if room > 0 else ()
            waiting = next((head for head in heads if not self._is_blocked(head, room)), None)
            if waiting is None:
                self._rivals = self._rivals[:2]
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

    def _divide_prefixes(self) -> None:
        """Where states of prompts are scarce, begin a prompt of the share that has fewest of them,
        and have another share give one up for it."""
        first = self.waiting.peek()
        if first is None or self.is_held or self.room <= 0:
            return
        line = self.waiting.get_queue(first.share.tier.priority)
        if self.prefixes.num_available > len(line):
            return
        heads = (next(line.list_groups(share)) for share in line.shares())
        wanting = [head for head in heads if head.num_unprefilled and head.needs_prefix]
        if not wanting or (len(line) == 1 and self.prefixes.num_available):
            return
        group = min(wanting, key=lambda head: (head.share.pins, head.share.last_begun))
        if not (self.table.num_free or self.may_displace(group.share)):
            return
        if self.prefixes.num_available or self._give_up_prefix(group.share):
            self.waiting.discard(group)
            self._take_up(group)

    def _give_up_prefix(self, share: FairShare) -> bool:
        """Have a group give up the state of its prompt for this share, and feed it again when it is
        its turn; returns whether a slot is free now."""
        for group in () if self._yielding else self._givers(share):
            if group.prefix and (group in self.paced or group.prefix.pins == 1):
                self.forking.discard(group)
                self.paced.pop(group, None)
                self._yielding = group
                if not self._yield() or self.prefixes.num_available:
                    break
        return self.prefixes.num_available > 0

    def _givers(self, share: FairShare) -> Iterator[SequenceGroup]:
        """Yield groups that may have to give up their state for this share: those of which nothing
        may start, and those of lower priority, or of a share with more than twice the states, that
        have made use of it or can make none."""
        priority = share.tier.priority

        def is_spared(other: FairShare) -> bool:
            if other.tier.priority != priority:
                return other.tier.priority > priority
            return other is share or bool(share.pins and other.pins <= 2 * (share.pins + 1))

        paced = [group for group in self.paced if group.prefix]
        yield from sorted(paced, key=lambda group: (group.share.tier.priority, -group.share.pins))
        for lower in reversed(self.forking.priorities):
            line = self.forking.get_queue(lower)
            for rich in sorted(line.shares(), key=lambda share: -share.pins):
                if is_spared(rich):
                    continue
                groups = list(line.list_groups(rich))
                # The last in line, or else the first, whose started sequences soon have a row.
                idle = [group for group in reversed(groups) if not group.unforked]
                for group in idle + [group for group in groups if group.unforked]:
                    is_used = group.started > group.begun_at or rich.load > share.load
                    if lower < priority or is_used:
                        yield group

    def _yield(self) -> bool:
        """Free the prefix of the group that gives it up, once all its started sequences read it."""
        group = self._yielding
        if group is None or group.unforked:
            return False
        self._yielding = None
        if group.unstarted:
            self.prefill_again(group)
        return True

    def _take_up(self, group: SequenceGroup) -> int:
        """Begin a group's prompt or start its sequences; returns how many tokens are to be fed."""
        if group.stop_row < 0:
            group.stop_row = self.stop_sets.acquire(group.stop_ids)
        if group.num_unprefilled and not self.prefill.begin(group):
            return 0
        if group.taken_up is None:
            self.latencies.take_up(group)
        if not group.num_unprefilled:
            if group.request.returns_state:
                self.prepared.append(group)
            else:
                self._start(group)
            return 0
        self._begin_prefill(group)
        return group.num_unprefilled

    def _begin_prefill(self, group: SequenceGroup) -> None:
        if not group.needs_prefix:
            slots = self.table.assign_slots(group, 1)
            group.slot = int(slots[0])
            self._count_started(group, slots)
        self.prefill.push(group)

    def _start(self, group: SequenceGroup) -> None:
        """Start sequences of a prefilled group, as many as its share is to have now."""
        count = min(group.startable, self._portion(group))
        if count:
            slots = self.table.assign_slots(group, count)
            self.table.is_running[slots] = True
            self._count_started(group, slots)
        if group.unstarted:
            self.line_up(self.forking, group)

    def _resume(self, group: SequenceGroup) -> None:
        """Give slots to parked sequences of a group, as many as its share is to have now."""
        if group.stop_row < 0:
            group.stop_row = self.stop_sets.acquire(group.stop_ids)
        if group.taken_up is None:
            self.latencies.take_up(group)
        portion = self._portion(group)
        while portion and self.parking.holds(group):
            parked, times = self.parking.pop_parked(group, portion)
            slots = self.table.take_back(group, parked)
            self.table.is_running[slots] = True
            self.refeed.resume(group, slots)
            group.remember(parked.indices, slots)
            self.latencies.resume(slots, times)
            self.shares.own(group.share, group.request.precedence, len(slots))
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
            rivals = line.get_queue(share.tier.priority)
            if len(rivals) > (share in rivals):
                others += rivals.weight - (share.weight if share in rivals else 0)
        if not others:
            return free
        return min(free, math.ceil(free * share.weight / (share.weight + others) / 2))

    def _count_waiting(self, group: SequenceGroup, count: int) -> None:
        """Count `count` of its sequences as waiting for slots, and no others."""
        priority, more = group.request.priority, count - group.waiting
        group.waiting = count
        self.num_waiting += more
        if more:
            add_to(self._waiting_at, priority, more)
            add_to(group.share.waiting, group.request.precedence, more)

    def _count_bytes(self, group: SequenceGroup, more: int) -> None:
        self.waiting_bytes += more
        group.share.waiting_bytes += more

    def _count_started(self, group: SequenceGroup, slots: I32) -> None:
        self.latencies.start(group, slots)
        group.start(slots)
        self._count_waiting(group, group.startable)
        self.num_left += len(slots)
        self.shares.own(group.share, group.request.precedence, len(slots))
        if not group.unstarted:
            self._count_bytes(group, -group.num_bytes)
        if group.prefix is not None:
            group.unforked += len(slots)


def _urgency(group: SequenceGroup) -> tuple[int, float, int, tuple[int, Order]]:
    """Sort key: the largest is served first."""
    share = group.share
    return (share.tier.priority, -share.load, -share.number, group.turn)


def _precede(precedence: int) -> Callable[[SequenceGroup], bool]:
    return lambda group: group.request.precedence > precedence
