"""Turns: which running sequences a step decodes when there are more than it has rows.

Sequences of the highest priority first, then those of the next one; within a priority slots take
turns. Knows the slots' arrays only. Keeps: with one priority, the work of a step depends on its
rows and not on how many slots there are, but for counting those that run.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from engine.batch import I64
from engine.pace import MIXED, Turn
from engine.shares import Shares
from engine.slots import SlotTable


class Turns:
    """Whose turn it is, of each priority."""

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._next: dict[int, int] = {}  # the slot whose turn it is, by priority

    def take(self, table: SlotTable, shares: Shares) -> tuple[I64, Turn | None]:
        """Slots to decode, i64[max_rows at most], and which turn that is, as in `engine.pace`."""
        num_running = int(np.count_nonzero(table.is_running))
        if num_running <= self._max_rows:
            return np.flatnonzero(table.is_running), None
        owning = shares.owning
        self._next = {one: slot for one, slot in self._next.items() if one in owning}
        if len(owning) > 1:
            return self._by_priority(table, shares), MIXED
        (priority,) = owning
        return self._in_turn(table, priority, num_running)

    def _in_turn(self, table: SlotTable, priority: int, num_running: int) -> tuple[I64, Turn]:
        """Ascending from the slot whose turn it is."""
        is_running, limit = table.is_running, self._max_rows
        # More are running than are wanted: so they are found before the search comes round.
        chosen, begin = np.empty(0, np.int64), self._next.get(priority, 0)
        turn = begin
        while len(chosen) < limit:
            missing = limit - len(chosen)
            stretch = 1 + missing * len(is_running) // num_running
            found = turn + np.flatnonzero(is_running[turn : turn + stretch])[:missing]
            chosen = np.concatenate([chosen, found])
            turn = turn + stretch if turn + stretch < len(is_running) else 0
        self._next[priority] = int(chosen[-1]) + 1
        return chosen, (begin, self._next[priority])

    def _by_priority(self, table: SlotTable, shares: Shares) -> I64:
        """Every running slot of the higher priorities, and a turn of the one that must share."""
        limit = self._max_rows
        slots = np.flatnonzero(table.is_running)
        priorities = shares.priorities[table.share[slots]]
        descending = shares.owning[::-1]
        # The first one that, with all above it, is too many.
        shared = descending[
            bisect_left(
                descending,
                True,
                key=lambda one: int(np.count_nonzero(priorities >= one)) > limit,
            )
        ]
        above, own = slots[priorities > shared], slots[priorities == shared]
        begin = int(np.searchsorted(own, self._next.get(shared, 0)))
        turn = np.concatenate([own[begin:], own[:begin]])[: limit - len(above)]
        if len(turn):
            self._next[shared] = int(turn[-1]) + 1
        return np.concatenate([above, turn])
