"""Which samples of a prompt are in the reply, decided as they finish in whatever order.

With a count m it is those of index 0 … j, j the smallest index up to which m samples match. So it
depends on the samples alone, not on when they finish, and short ones have no advantage. Once m have
matched, none behind the m-th smallest of their indices can be in it. Knows no pattern and no text.
"""

from __future__ import annotations

import heapq
from typing import Generic, TypeVar

_Kept = TypeVar("_Kept")


class Draw(Generic[_Kept]):
    """The samples of one prompt, until enough of them match."""

    def __init__(self, n: int, enough: int) -> None:
        """`enough` is 1 … n matching ones."""
        self.end = n
        """Samples from this one on are not in the reply; it only sinks."""
        self._enough = enough
        self._smallest: list[int] = []  # negated indices of the first that matched, a heap
        self._next = 0  # all before have been given
        self._held: dict[int, _Kept] = {}

    def take(self, index: int, matched: bool, sample: _Kept) -> list[_Kept]:
        """A sample has finished; those which are now known to be in the reply, in order."""
        if index >= self.end:
            return []
        self._held[index] = sample
        if matched:
            heapq.heappush(self._smallest, -index)
            if len(self._smallest) > self._enough:
                heapq.heappop(self._smallest)
            if len(self._smallest) == self._enough:
                self._sink(1 - self._smallest[0])
        certain = []
        while self._next < self.end and self._next in self._held:
            certain.append(self._held.pop(self._next))
            self._next += 1
        return certain

    def _sink(self, end: int) -> None:
        if end >= self.end:
            return
        for index in range(end, self.end):  # n in all, however often it sinks
            self._held.pop(index, None)
        self.end = end
