"""The rate at which sequences leave the queue, and how long the rest of it takes at that rate."""

from __future__ import annotations

import math
from collections import deque

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
