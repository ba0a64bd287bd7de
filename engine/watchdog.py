"""Watchdog: ends a process that makes no progress, and says where it stood.

The clock is a thread of the interpreter's own that needs neither its lock nor its health, so it
also sees a hang inside a library. There is one clock in a process.
"""

from __future__ import annotations

import faulthandler
import time

REARM_S = 0.25
"""Progress is told to the clock at most so often: telling it starts a thread."""


class Watchdog:
    """Once fed, it must be fed again within `timeout_s`, or the process exits with code 1.

    The stacks of all threads go to standard error then. 0 waits for ever.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._armed_at = -REARM_S

    def feed(self) -> None:
        """There is progress."""
        now = time.monotonic()
        if self._timeout_s and now - self._armed_at >= REARM_S:
            self._armed_at = now
            faulthandler.dump_traceback_later(self._timeout_s, exit=True)

    def stop(self) -> None:
        """From now on nothing is expected."""
        faulthandler.cancel_dump_traceback_later()
