"""Watchdog: ends a process that makes no progress, and says where it stood.

Heartbeat: shows other processes that there is progress. The watchdog's clock is a thread of the
interpreter's own that needs neither its lock nor its health, so it also sees a hang inside a
library. There is one clock in a process.
"""

from __future__ import annotations

import faulthandler
import logging
import mmap
import time
from array import array

logger = logging.getLogger(__name__)

REARM_S = 0.25  # least seconds between two resets of the clock: each one starts a thread


class Watchdog:
    """Once fed, it must be fed again within `timeout_s`, or the process exits with code 1.

    It then writes the stacks of all threads to standard error. 0 waits for ever.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._armed_at = -REARM_S
        self._is_failing = False

    def note_progress(self) -> None:
        """Note progress: start the time-out anew."""
        now = time.monotonic()
        if self._timeout_s and now - self._armed_at >= REARM_S:
            self._armed_at = now
            try:
                faulthandler.dump_traceback_later(self._timeout_s, exit=True)
            except RuntimeError as error:  # no thread is left, or no standard error
                if not self._is_failing:
                    logger.warning("nobody watches this process for now: %s", error)
                self._is_failing = True
            else:
                self._is_failing = False

    def stop(self) -> None:
        """Stop watching."""
        faulthandler.cancel_dump_traceback_later()


class Heartbeat:
    """Two numbers in memory that whoever started the process reads: when it last showed progress,
    by the monotonic clock, and how many steps it had made. Both are 0 until it serves.

    From them that process sees what no process sees of itself: that it is frozen.
    """

    BYTES = 16

    def __init__(self, fd: int) -> None:
        self._numbers = memoryview(mmap.mmap(fd, self.BYTES)).cast("d")
        self._beat_at = -REARM_S
        self.beat(0)

    def beat(self, steps: int) -> None:
        """Note progress: `steps` steps by now."""
        now = time.monotonic()
        if now - self._beat_at >= REARM_S:
            self._beat_at = now
            self._numbers[:] = array("d", (now, steps))
