"""Live times of a run, for progress displays: a few hundred counts, cheap to send.

What is reported afterwards comes from the recording and not from here.
"""

from __future__ import annotations

import time

import msgspec
import numpy as np

from loadtest.rows import Rows

_BOUNDS = np.geomspace(1e-4, 1e3, 281)
"""Bucket bounds in seconds; a bucket is 6 % wide."""


class Times(msgspec.Struct):
    """Times of one client process."""

    first_bytes: list[int]
    """[buckets] Ended requests by time from the planned time to the reply's first byte."""
    lateness_s: float
    """The worst time from planned to sent, of requests that ended since the last call."""
    cpu_share: float
    """The share of one core that the process used since the last call."""


class LiveStats:
    """Live statistics of one process, updated when asked for."""

    def __init__(self, requests: Rows) -> None:
        """`requests` are rows of recording.REQUEST, which grow."""
        self._requests = requests
        self._seen = 0
        self._first_bytes = np.zeros(len(_BOUNDS) + 1, np.int64)
        self._told, self._cpu_s = time.monotonic(), time.process_time()

    def times(self) -> Times:
        rows = self._requests.since(self._seen)
        self._seen += len(rows)
        taken = rows["first_byte"] - rows["planned"]
        places = np.searchsorted(_BOUNDS, taken[~np.isnan(taken)])
        self._first_bytes += np.bincount(places, minlength=len(self._first_bytes))
        late = rows["sent"] - rows["planned"]
        told, self._told = self._told, time.monotonic()
        cpu_s, self._cpu_s = self._cpu_s, time.process_time()
        return Times(
            self._first_bytes.tolist(),
            float(late[~np.isnan(late)].max(initial=0.0)),
            (self._cpu_s - cpu_s) / max(self._told - told, 1e-9),
        )


def first_byte_percentiles(times: list[Times]) -> tuple[float, float]:
    """Return p50 and p99 over all processes, in seconds; NaN if nothing has ended."""
    total = np.cumsum(sum(np.array(one.first_bytes) for one in times))
    if not total[-1]:
        return float("nan"), float("nan")
    p50, p99 = (int(np.searchsorted(total, share * total[-1])) for share in (0.5, 0.99))
    uppers = np.append(_BOUNDS, np.inf)
    return float(uppers[p50]), float(uppers[p99])
