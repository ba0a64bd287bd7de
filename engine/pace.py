"""Pace: how long sequences waited for their next token, counted without looking at each.

A step serves every running slot of one stretch of slots: all of them, or those whose turn it is. So
slots last served by the same step lie side by side, and a few boundaries say when each was. Knows
no sequences. Keeps: the counts of a step add up to its rows that are not their sequence's first.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

import numpy as np

from engine.batch import I64

Turn = tuple[int, int]
"""From this slot on, up to but not including that one, past the last slot if need be."""
Gap = tuple[float, int]
"""Seconds between two tokens, and how many rows waited so long."""


class Pace:
    """When each slot was served last, as stretches of slots."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._begins = [0]  # of the stretches, ascending
        self._times = [0.0]  # seconds, of the step that served each

    def serve(self, slots: I64, first: I64, turn: Turn | None, now: float) -> list[Gap]:
        """The running slots of a turn, or of all slots, were served at `now`: (seconds, rows).

        `slots`: i64[D], ascending from where the turn begins. `first`: i64[S], those of them that
        were served for the first time, and so did not wait for a next token.
        """
        if turn is None and len(self._begins) == 1:
            gaps = [(now - self._times[0], len(slots) - len(first))]
            self._times[0] = now
            return gaps if gaps[0][1] else []
        found: list[Gap] = []
        first = np.sort(first)
        begin, stop = turn or (0, self._num_slots)
        if begin < stop:
            return self._serve_stretch(slots, first, begin, stop, now)
        # Past the last slot: two stretches, and the slots of each ascend.
        cut = bisect_left(range(len(slots)), True, key=lambda row: bool(slots[row] < begin))
        if begin < self._num_slots:
            found += self._serve_stretch(slots[:cut], first, begin, self._num_slots, now)
        if stop:
            found += self._serve_stretch(slots[cut:], first, 0, stop, now)
        return found

    def _serve_stretch(
        self, slots: I64, first: I64, begin: int, stop: int, now: float
    ) -> list[Gap]:
        low = bisect_right(self._begins, begin) - 1
        high = bisect_left(self._begins, stop)
        edges = [begin, *self._begins[low + 1 : high], stop]
        rows = np.diff(np.searchsorted(slots, edges)) - np.diff(np.searchsorted(first, edges))
        gaps = [
            (now - time, count)
            for time, count in zip(self._times[low:high], rows.tolist(), strict=True)
            if count
        ]
        begins, times = [begin], [now]
        if stop < (self._begins[high] if high < len(self._begins) else self._num_slots):
            begins.append(stop)  # the rest of the last one
            times.append(self._times[high - 1])
        low += self._begins[low] < begin  # the beginning of the first one stays
        self._begins[low:high], self._times[low:high] = begins, times
        return gaps
