"""Ranges of places 0, 1, 2, … given out in stretches of any size, and taken back.

A stretch begins in the first gap that has room, or behind all others; adjacent gaps are merged. So
the places in use stay below the peak ever used at once, but for gaps too small for any stretch.
"""

from __future__ import annotations

from bisect import bisect_left


class Stretches:
    """The free places."""

    def __init__(self) -> None:
        self.end = 0  # of the last stretch
        # Gaps before it: ascending, and none touches the next.
        self._begins: list[int] = []
        self._ends: list[int] = []

    def take(self, size: int) -> int:
        """Take a stretch of `size` places; return its first."""
        for at, (begin, end) in enumerate(zip(self._begins, self._ends, strict=True)):
            if end - begin >= size:
                self._begins[at] += size
                if self._begins[at] == end:
                    del self._begins[at], self._ends[at]
                return begin
        self.end += size
        return self.end - size

    def give_back(self, begin: int, size: int) -> None:
        """Free a stretch."""
        end, at = begin + size, bisect_left(self._begins, begin)
        if at < len(self._begins) and self._begins[at] == end:
            end = self._ends[at]
            del self._begins[at], self._ends[at]
        if at and self._ends[at - 1] == begin:
            at -= 1
            begin = self._begins[at]
            del self._begins[at], self._ends[at]
        if end == self.end:
            self.end = begin
        else:
            self._begins.insert(at, begin)
            self._ends.insert(at, end)
