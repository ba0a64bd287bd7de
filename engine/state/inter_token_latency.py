"""Inter-token latency: how long sequences waited for their next token, without looking at each.

A step serves every running slot of one stretch of slots: all of them, or those whose turn it is. So
slots last served by the same step lie side by side, and a few boundaries say when each was. Only
where steps serve slots of high priority beside some of a lower one is the time of each slot kept.
Keeps: the counts of a step add up to its rows that are not their sequence's first.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right

import numpy as np
import numpy.typing as npt

from engine.steps.batch import I64

F64 = npt.NDArray[np.float64]
Turn = tuple[int, int]
"""From the first slot up to but not including the second, past the last slot if need be."""
MIXED: Turn = (-1, -1)  # the slots served do not follow each other
Gap = tuple[float, int]  # seconds between two tokens, and how many rows waited so long
EACH = math.nan  # in place of a stretch's time: each of its slots has one of its own


class InterTokenLatency:
    """When each slot was served last, as stretches of slots."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._begins = [0]  # of the stretches, ascending
        self._times = [0.0]  # seconds, of the step that served each, or EACH
        self._each: F64 | None = None  # f64[num_slots] seconds, in stretches of EACH

    def serve(self, slots: I64, first: I64, turn: Turn | None, now: float) -> list[Gap]:
        """Note that a turn's running slots, or all, were served at `now`; return (seconds, rows)
        pairs.

        `slots`: i64[D], ascending from where the turn begins, but for MIXED. `first`: i64[S], those
        of them that were served for the first time, and so did not wait for a next token.
        """
        if turn is None and len(self._begins) == 1 and self._each is None:
            gaps = [(now - self._times[0], len(slots) - len(first))]
            self._times[0] = now
            return gaps if gaps[0][1] else []
        if turn == MIXED:
            return self._serve_mixed(slots, first, now)
        found: list[Gap] = []
        first = np.sort(first)
        begin, stop = turn or (0, self._num_slots)
        if begin < stop:
            found = self._serve_stretch(slots, first, begin, stop, now)
        else:
            # Past the last slot: two stretches, and the slots of each ascend.
            cut = bisect_left(range(len(slots)), True, key=lambda row: bool(slots[row] < begin))
            if begin < self._num_slots:
                found += self._serve_stretch(slots[:cut], first, begin, self._num_slots, now)
            if stop:
                found += self._serve_stretch(slots[cut:], first, 0, stop, now)
        if self._each is not None and not any(map(math.isnan, self._times)):
            self._each = None
        return found

    def last(self, slots: I64) -> F64:
        """When these slots were served last: f64[len(slots)], in seconds."""
        times = np.array(self._times)[np.searchsorted(self._begins, slots, "right") - 1]
        return times if self._each is None else np.where(np.isnan(times), self._each[slots], times)

    def _serve_mixed(self, slots: I64, first: I64, now: float) -> list[Gap]:
        each = self._each if self._each is not None else np.zeros(self._num_slots)
        ends = [*self._begins[1:], self._num_slots]
        for begin, end, time in zip(self._begins, ends, self._times, strict=True):
            if not math.isnan(time):
                each[begin:end] = time
        self._each, self._begins, self._times = each, [0], [EACH]
        gaps = self._gaps_of_each(slots, first, now)
        each[slots] = now
        return gaps

    def _gaps_of_each(self, slots: I64, first: I64, now: float) -> list[Gap]:
        assert self._each is not None
        waited = slots[~np.isin(slots, first)] if len(first) else slots
        times, counts = np.unique(self._each[waited], return_counts=True)
        return list(zip((now - times).tolist(), counts.tolist(), strict=True))

    def _serve_stretch(
        self, slots: I64, first: I64, begin: int, stop: int, now: float
    ) -> list[Gap]:
        low = bisect_right(self._begins, begin) - 1
        high = bisect_left(self._begins, stop)
        edges = [begin, *self._begins[low + 1 : high], stop]
        cuts = np.searchsorted(slots, edges)
        rows = np.diff(cuts) - np.diff(np.searchsorted(first, edges))
        gaps: list[Gap] = []
        for place, (time, count) in enumerate(
            zip(self._times[low:high], rows.tolist(), strict=True)
        ):
            if math.isnan(time):
                gaps += self._gaps_of_each(slots[cuts[place] : cuts[place + 1]], first, now)
            elif count:
                gaps.append((now - time, count))
        begins, times = [begin], [now]
        if stop < (self._begins[high] if high < len(self._begins) else self._num_slots):
            begins.append(stop)  # the rest of the last one
            times.append(self._times[high - 1])
        low += self._begins[low] < begin  # the beginning of the first one stays
        self._begins[low:high], self._times[low:high] = begins, times
        return gaps
