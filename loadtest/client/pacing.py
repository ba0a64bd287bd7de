"""Schedules the requests of one process: at fixed times, or each when an earlier one has ended.

Open loops look at the clock alone, so a server that stalls cannot hold requests back.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from srm.loadtest.workload.workload import RequestPlan, Workload

_AT_ONCE = 64
"""Requests that begin before the event loop runs again."""
_AHEAD = 256
"""Request bodies that are made in advance."""
_PAUSE_S = 0.1
"""Pause of a closed loop after a failed connection."""

_CLOCK_MONOTONIC = 1
_ABSOLUTE = 1
_SPEC = struct.Struct("4l")
"""A struct itimerspec: interval and time, each in seconds and nanoseconds."""

Send = Callable[[int, float, RequestPlan], None]
"""Sends a request, given its index, its planned time in seconds since the start, and its plan."""
Finished = Callable[[float], None]
"""Called once when no more will begin, with the second of the run from which grace counts."""


class Alarm:
    """Calls back once after each `set`, on the monotonic clock with microsecond resolution; timers
    of the event loop have milliseconds. Must be closed.

    Linux only, by a timerfd; Python has those from 3.13 on.
    """

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


class Ahead:
    """The requests of one process in the order of its indices, some made in advance."""

    def __init__(self, workload: Workload, indices: Iterator[int]) -> None:
        self._workload = workload
        self._indices = indices
        self._made: deque[tuple[int, RequestPlan]] = deque()
        self.fill(_AHEAD)

    def fill(self, most: int) -> None:
        """Make up to so many more, while there is room."""
        for index in islice(self._indices, min(most, _AHEAD - len(self._made))):
            self._made.append((index, self._workload.request(index)))

    def pop_next(self) -> tuple[int, RequestPlan] | None:
        """Return the next request; None after the last."""
        if not self._made:
            self.fill(1)
        return self._made.popleft() if self._made else None


class OpenLoop:
    """Begins each request at its time; a backlog is sent over several turns of the event loop."""

    def __init__(self, times: NDArray[np.float64], own: slice, workload: Workload) -> None:
        """`times` [requests] are of the whole plan; `own` selects those of this process."""
        self._own = times[own]
        self._last = float(times[-1]) if len(times) else 0.0
        self._ahead = Ahead(workload, iter(range(len(times))[own]))
        self._next = 0
        self._is_over = False

    def start(self, started: float, send: Send, finished: Finished) -> None:
        """Begin. `started` is the time.monotonic() of second 0."""
        self._started, self._send, self._finished = started, send, finished
        self._alarm = Alarm(self._due)
        self._due()

    def planned(self, now: float) -> int:
        """Return how many of this process's requests should have begun by this second."""
        return int(np.searchsorted(self._own, now, side="right"))

    def ended(self, _kind: str) -> None:
        """Do nothing: an open loop does not depend on replies."""

    def stop(self) -> None:
        """Begin no more."""
        if not self._is_over:
            self._is_over = True
            self._alarm.close()
            self._finished(self._last)

    def _due(self) -> None:
        now = time.monotonic() - self._started
        begun = 0
        while self._next < len(self._own) and begun < _AT_ONCE and self._own[self._next] <= now:
            planned = float(self._own[self._next])
            self._next += 1
            begun += 1
            taken = self._ahead.pop_next()
            assert taken is not None, "as many requests as times"
            self._send(taken[0], planned, taken[1])
            if self._is_over:  # the machine cannot go on
                return
        self._ahead.fill(begun + 1)
        if self._next < len(self._own):
            self._alarm.set(self._started + float(self._own[self._next]))
        else:
            self.stop()


class ClosedLoop:
    """Keeps a fixed number of requests under way; each begins when another has ended."""

    def __init__(
        self, concurrency: int, indices: Iterator[int], workload: Workload, duration_s: float
    ) -> None:
        """`duration_s` is when the last request may begin; 0: no limit but the indices."""
        self._ahead = Ahead(workload, indices)
        self._due = deque([0.0] * concurrency)  # begin times that are due; seconds of the run
        self._duration_s = duration_s
        self._begun = 0
        self._is_over = False

    def start(self, started: float, send: Send, finished: Finished) -> None:
        """Begin. `started` is the time.monotonic() of second 0."""
        self._started, self._send, self._finished = started, send, finished
        self._loop = asyncio.get_running_loop()
        if self._duration_s:
            self._loop.call_later(self._duration_s, self.stop)
        self._begin()

    def planned(self, _now: float) -> int:
        """Return how many have begun."""
        return self._begun

    def ended(self, kind: str) -> None:
        """Begin another request; after a pause if the connection failed."""
        if kind == "connect":
            self._loop.call_later(_PAUSE_S, self._another)
        else:
            self._another()

    def stop(self) -> None:
        """Begin no more."""
        if not self._is_over:
            self._is_over = True
            self._finished(time.monotonic() - self._started)

    def _another(self) -> None:
        self._due.append(time.monotonic() - self._started)
        if len(self._due) == 1:
            self._begin()

    def _begin(self) -> None:
        for _ in range(min(len(self._due), _AT_ONCE)):
            if self._is_over:
                return
            taken = self._ahead.pop_next()
            if taken is None:
                self.stop()
                return
            self._begun += 1
            self._send(taken[0], self._due.popleft(), taken[1])
            self._ahead.fill(1)
        if self._due:
            self._loop.call_soon(self._begin)
