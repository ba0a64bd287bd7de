"""Fair shares: who holds how many slots, of each priority, and by what weights they divide them.

A share is whatever `Request.share` names, a tenant or a job, at one priority, as long as it has
requests. Of those who wait, the one with the least load goes first: so slots are divided by weight
whatever each one asks for. Precedence orders a share's own requests, and changes no load.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from srm.engine.messages import Request
from srm.engine.steps.batch import I64

UNIT = 2.0**-62
"""Unit in which weights are counted. Every float from MIN_WEIGHT on is a whole number of these: so
a sum that shares join and leave is exact, and no remainder of rounding is taken for a share."""


@dataclass(slots=True, eq=False)
class Tier:
    """All shares of one priority."""

    priority: int
    members: dict[str, FairShare] = field(default_factory=dict)
    weight: int = 0  # sum of the members' weights
    owned: int = 0  # slots the members hold


@dataclass(slots=True, eq=False)
class FairShare:
    """One name's part of the slots that its priority has."""

    name: str
    tier: Tier
    number: int
    """Grows with each share that begins or gets slots: the smaller, the longer ago that was."""
    place: int
    """An index of its own while it exists; indices are reused, so arrays by index stay small."""
    weight: int = 0  # in units of `UNIT`
    groups: Counter[int] = field(default_factory=Counter)
    """Its requests that are not over, by precedence."""
    waiting: Counter[int] = field(default_factory=Counter)
    """Its sequences that are still to start, by precedence."""
    waiting_bytes: int = 0  # of its requests that have such sequences
    owned: int = 0  # slots it holds
    owned_at: Counter[int] = field(default_factory=Counter)  # the same by precedence, none being 0
    parked: int = 0  # its sequences that are parked
    pins: int = 0  # states of prompts that its requests have pinned
    last_begun: int = 0  # number of the last of its requests' prompts that was begun
    rankings: list[Callable[[FairShare, int], None]] = field(default_factory=list)
    """Called with a share whose load changed, and by how much its weight grew: it waits there."""

    def waiting_before(self, precedence: int) -> int:
        """Number of its waiting sequences of this precedence or a higher one."""
        return sum(count for own, count in self.waiting.items() if own >= precedence)

    @property
    def load(self) -> float:
        """Slots it holds, divided by its weight."""
        return self.owned / self.weight


class FairShares:
    """All shares, by priority."""

    def __init__(self) -> None:
        self.tiers: dict[int, Tier] = {}
        self.priorities: I64 = np.zeros(1, np.int64)  # i64 of the share at each place
        self.mixed: dict[FairShare, None] = {}
        """Shares whose requests have several precedences, in the order in which they came to."""
        self._next_number = 0
        self._places = [0]  # free ones, the smallest last

    @property
    def owning(self) -> list[int]:
        """Priorities that hold slots, the lowest first."""
        return sorted(tier.priority for tier in self.tiers.values() if tier.owned)

    def find(self, request: Request) -> FairShare | None:
        """Return the share that the request would belong to, if there is one."""
        tier = self.tiers.get(request.priority)
        return None if tier is None else tier.members.get(request.share)

    def enter(self, request: Request) -> FairShare:
        """Return the share of a request that begins; its weight is the one last sent."""
        tier = self.tiers.get(request.priority)
        if tier is None:
            tier = self.tiers[request.priority] = Tier(request.priority)
        share = tier.members.get(request.share)
        if share is None:
            place = self._take_place(request.priority)
            share = FairShare(request.share, tier, self._next_number, place)
            self._next_number += 1
            tier.members[share.name] = share
        self.weigh(share, request.weight)
        share.groups[request.precedence] += 1
        if len(share.groups) > 1:
            self.mixed[share] = None
        return share

    def leave(self, share: FairShare, precedence: int) -> None:
        """Note that one of its requests, of this precedence, is over and holds no slot."""
        add_to(share.groups, precedence, -1)
        if len(share.groups) < 2:
            self.mixed.pop(share, None)
        if not share.groups:
            assert not share.owned and not share.rankings, "a share went that still has something"
            tier = share.tier
            self._places.append(share.place)
            del tier.members[share.name]
            tier.weight -= share.weight
            if not tier.members:
                del self.tiers[tier.priority]

    def weigh(self, share: FairShare, weight: float) -> None:
        """Change the share's weight."""
        heavier = int(weight / UNIT) - share.weight
        if heavier:
            share.tier.weight += heavier
            share.weight += heavier
            for ranking in share.rankings:
                ranking(share, heavier)

    def own(self, share: FairShare, precedence: int, count: int) -> None:
        """Count `count` more slots as the share's, for requests of this precedence."""
        if count > 0:
            share.number = self._next_number
            self._next_number += 1
        share.owned += count
        add_to(share.owned_at, precedence, count)
        share.tier.owned += count
        for ranking in share.rankings:
            ranking(share, 0)

    def _take_place(self, priority: int) -> int:
        if not self._places:
            size = len(self.priorities)
            self.priorities = np.append(self.priorities, np.zeros(size, np.int64))
            self._places = list(range(2 * size - 1, size - 1, -1))
        place = self._places.pop()
        self.priorities[place] = priority
        return place


def add_to(counts: Counter[int], key: int, more: int) -> None:
    """Add to a count, and keep none that is 0."""
    counts[key] += more
    if not counts[key]:
        del counts[key]
