"""Round robin: which running sequences a step decodes when there are more than it has rows.

Sequences of the highest priority first, then those of the next one; within a priority those that
have not sampled yet, then the others in turn. Keeps: with one priority, the work of a step depends
on its rows and not on how many slots there are, but for counting those that run or begin.
"""

from __future__ import annotations

import numpy as np

from engine.state.fair_share import FairShares
from engine.state.slots import SlotTable
from engine.steps.batch import I64, Bool


class RoundRobin:
    """The slot whose turn it is, for each priority."""

    def __init__(self) -> None:
        self._next: dict[int, int] = {}  # the slot whose turn it is, by priority

    def take(self, table: SlotTable, shares: FairShares, room: int) -> tuple[I64, bool]:
        """The slots to decode, i64[room at most], and whether others run too."""
        num_running = int(np.count_nonzero(table.is_running))
        if num_running <= room:
            return np.flatnonzero(table.is_running), False
        owning = shares.owning
        self._next = {one: slot for one, slot in self._next.items() if one in owning}
        if len(owning) > 1:
            return self._by_priority(table, shares, room), True
        (priority,) = owning
        return self._in_turn(table, None, priority, num_running, room), True

    def _by_priority(self, table: SlotTable, shares: FairShares, room: int) -> I64:
        """All running slots of the higher priorities, and a turn of the first that does not fit."""
        descending = shares.owning[::-1]
        counts = np.cumsum([shares.tiers[one].owned for one in descending])  # or fewer that run
        fitting = int(np.searchsorted(counts, room, "right"))
        chosen = []
        if fitting:
            is_above = shares.priorities >= descending[fitting - 1]  # by place: few
            chosen.append(np.flatnonzero(is_above[table.share] & table.is_running))
            room -= len(chosen[0])
        for priority in descending[fitting:]:
            if not room:
                break
            its_own, owned = shares.priorities == priority, shares.tiers[priority].owned
            chosen.append(self._in_turn(table, its_own, priority, owned, room))
            room -= len(chosen[-1])
        return np.concatenate(chosen)

    def _in_turn(
        self, table: SlotTable, its_own: Bool | None, priority: int, most: int, limit: int
    ) -> I64:
        """Up to `limit` running slots of the priority: new ones, then from the one whose turn it is
        on.

        `most` slots of the priority run. `its_own[place]`: whether a share belongs to the priority;
        None if no other priority runs.
        """
        is_running = table.is_running
        new = np.flatnonzero(table.is_new & is_running)
        if its_own is not None:
            new = new[its_own[table.share[new]]]
        if len(new) > limit:
            new = new[np.argpartition(table.sequence_id[new], limit)[:limit]]  # the earliest
        chosen, turn = [new], self._next.get(priority, 0)
        missing, left = limit - len(new), len(is_running)
        while missing and left:
            # Expect them in so many slots; do not wrap around, nor pass where the search began.
            stretch = min(1 + missing * len(is_running) // most, len(is_running) - turn, left)
            runs = is_running[turn : turn + stretch] & ~table.is_new[turn : turn + stretch]
            if its_own is not None:
                runs = runs & its_own[table.share[turn : turn + stretch]]
            found = turn + np.flatnonzero(runs)[:missing]
            if len(found):
                chosen.append(found)
                self._next[priority] = int(found[-1]) + 1
            missing -= len(found)
            left -= stretch
            turn = turn + stretch if turn + stretch < len(is_running) else 0
        return np.concatenate(chosen)
