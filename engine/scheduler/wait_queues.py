"""Wait queues: groups that wait for the same thing, in serving order: strict, or fair to shares;
and the rate at which sequences leave them.

A strict line serves by priority and arrival. A fair one serves by priority, then the share with the
least load, of these the one that got slots longest ago, then precedence and arrival. Keeps: what a
push or a pop costs depends on how many shares wait, and that little, not on how many groups do.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any, NamedTuple

from srm.engine.state.fair_share import FairShare
from srm.engine.state.sequence import SequenceGroup

_order, _turn = attrgetter("order"), attrgetter("turn")


class WaitQueue:
    """Groups in order of priority and arrival, or of another key: the largest is served first."""

    def __init__(self, key: Callable[[SequenceGroup], Any] = _order) -> None:
        self._key = key
        self._groups: deque[SequenceGroup] = deque()  # the next one is last

    def __iter__(self) -> Iterator[SequenceGroup]:
        return reversed(self._groups)

    def __len__(self) -> int:
        return len(self._groups)

    def push(self, group: SequenceGroup) -> None:
        key = self._key
        if not self._groups or key(group) < key(self._groups[0]):  # the common case: last
            self._groups.appendleft(group)
        else:
            insort(self._groups, group, key=key)

    def peek(self) -> SequenceGroup | None:
        return self._groups[-1] if self._groups else None

    def pop(self) -> SequenceGroup:
        return self._groups.pop()

    def discard(self, group: SequenceGroup) -> None:
        """Take the group out if it is here."""
        if self.peek() is group:
            self.pop()
            return
        index = bisect_left(self._groups, self._key(group), key=self._key)
        if index < len(self._groups) and self._groups[index] is group:
            del self._groups[index]


class _Ranked(NamedTuple):
    load: float
    number: int
    share: FairShare


class ShareQueue:
    """Groups of one priority, a line for each share."""

    def __init__(self) -> None:
        self.weight = 0  # of the shares that wait, together
        self._lines: dict[FairShare, WaitQueue] = {}
        self._ranked: list[_Ranked] = []  # least load first; empty while there is one share
        self._ranks: dict[FairShare, _Ranked] = {}

    def __len__(self) -> int:
        """Number of shares that wait."""
        return len(self._lines)

    def __contains__(self, share: FairShare) -> bool:
        return share in self._lines

    def list_groups(self, share: FairShare) -> Iterator[SequenceGroup]:
        """The share's groups, by precedence and arrival."""
        return iter(self._lines.get(share, ()))

    def shares(self) -> Iterator[FairShare]:
        """The shares that wait, the one with the least load first."""
        return (message.share for message in self._ranked) if self._ranked else iter(self._lines)

    def push(self, group: SequenceGroup) -> None:
        share = group.share
        line = self._lines.get(share)
        if line is None:
            line = self._lines[share] = WaitQueue(_turn)
            self.weight += share.weight
            share.rankings.append(self.rank)
            if len(self._lines) == 2:
                for queue in self._lines:
                    self._insert(queue)
            elif len(self._lines) > 2:
                self._insert(share)
        line.push(group)

    def peek(self) -> SequenceGroup:
        group = self._lines[next(self.shares())].peek()
        assert group is not None
        return group

    def discard(self, group: SequenceGroup) -> None:
        """Take the group out if it is here."""
        line = self._lines.get(group.share)
        if line is not None:
            line.discard(group)
            if not line:
                self._leave(group.share)

    def rank(self, share: FairShare, heavier: int) -> None:
        """Reorder a share whose load has changed, and whose weight grew by `heavier`."""
        self.weight += heavier
        if share in self._ranks:
            self._remove(share)
            self._insert(share)

    def _leave(self, share: FairShare) -> None:
        del self._lines[share]
        self.weight -= share.weight
        share.rankings.remove(self.rank)
        if share in self._ranks:
            self._remove(share)
        if len(self._lines) == 1:
            self._ranked.clear()
            self._ranks.clear()

    def _insert(self, share: FairShare) -> None:
        ranked = self._ranks[share] = _Ranked(share.load, share.number, share)
        insort(self._ranked, ranked)

    def _remove(self, share: FairShare) -> None:
        del self._ranked[bisect_left(self._ranked, self._ranks.pop(share))]


class FairQueue:
    """Groups in order of priority, load of their share, precedence, and arrival."""

    def __init__(self) -> None:
        self._lines: dict[int, ShareQueue] = {}
        self._priorities: list[int] = []  # ascending

    @property
    def priorities(self) -> list[int]:
        """Priorities of the groups that wait, the highest first."""
        return self._priorities[::-1]

    def get_queue(self, priority: int) -> ShareQueue:
        """The groups of this priority."""
        return self._lines.get(priority, NOBODY)

    def push(self, group: SequenceGroup) -> None:
        priority = group.request.priority
        line = self._lines.get(priority)
        if line is None:
            line = self._lines[priority] = ShareQueue()
            insort(self._priorities, priority)
        line.push(group)

    def peek(self) -> SequenceGroup | None:
        return self._lines[self._priorities[-1]].peek() if self._priorities else None

    def heads(self) -> Iterator[SequenceGroup]:
        """The first group of each share, in order."""
        for priority in self.priorities:
            line = self._lines[priority]
            for share in line.shares():
                yield next(line.list_groups(share))

    def discard(self, group: SequenceGroup) -> None:
        """Take the group out if it is here."""
        priority = group.request.priority
        line = self._lines.get(priority)
        if line is not None:
            line.discard(group)
            if not len(line):
                del self._lines[priority]
                self._priorities.remove(priority)


NOBODY = ShareQueue()  # the line of a priority at which no group waits


WINDOW_S = 30.0  # how far back the rate is measured
RESOLUTION_S = 1.0
LONGEST_S = 120  # most seconds ever returned: clients ignore more, and then do not come back at all


class QueueRate:
    """The rate at which a count grows, over the last `WINDOW_S`."""

    def __init__(self) -> None:
        self._noted: deque[tuple[float, int]] = deque()  # time in seconds, count
        self._last = (0.0, 0)

    def note(self, count: int, now: float) -> None:
        """Note that `count` have left in total by `now`, in seconds, which never decreases."""
        if not self._noted or now - self._noted[-1][0] >= RESOLUTION_S:
            self._noted.append((now, count))
        while len(self._noted) > 1 and self._noted[0][0] < now - WINDOW_S:
            self._noted.popleft()
        self._last = (now, count)

    def seconds_until(self, count: int, now: float) -> int:
        """Seconds until `count` more will have left: 1 … `LONGEST_S`; 1 while no rate is known."""
        if not count or not self._noted:
            return 1
        began, before = self._noted[0]
        elapsed, left = max(now, self._last[0]) - began, self._last[1] - before
        if elapsed < RESOLUTION_S:
            return 1
        if not left:
            return LONGEST_S
        return min(max(math.ceil(count * elapsed / left), 1), LONGEST_S)
