"""An alarm on the monotonic clock with microsecond resolution; event loop timers have milliseconds.

Linux only, by a timerfd; Python has those from 3.13 on.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import struct
from collections.abc import Callable

_CLOCK_MONOTONIC = 1
_ABSOLUTE = 1
_SPEC = struct.Struct("4l")
"""A struct itimerspec: interval and time, each in seconds and nanoseconds."""


class Alarm:
    """Calls back once after each `set`. Must be closed."""

    def __init__(self, callback: Callable[[], None]) -> None:
        """Must be called in a running loop. Raises OSError if no file descriptor is left."""
        self._callback = callback
        self._loop = asyncio.get_running_loop()
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._loop.add_reader(self._fd, self._ring)

    def set(self, at: float) -> None:
        """Ring at this time.monotonic(), which may be past, instead of at the time set before."""
        whole = int(at)
        nanoseconds = max(int((at - whole) * 1e9), 1)  # all zeros would turn it off
        spec = _SPEC.pack(0, 0, whole, nanoseconds)
        if self._libc.timerfd_settime(self._fd, _ABSOLUTE, spec, None) != 0:
            raise OSError(ctypes.get_errno(), f"timerfd_settime to {at}")

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)

    def _ring(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:  # set anew in the same turn
            return
        self._callback()
