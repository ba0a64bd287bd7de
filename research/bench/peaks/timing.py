"""The one way to time a call that takes too short for the clock."""

from __future__ import annotations

import time
from collections.abc import Callable


def seconds_per_call(
    run: Callable[[], object], wait: Callable[[], object], repetitions: int, least_s: float
) -> list[float]:
    """Return the seconds of one call, per repetition, each averaged over at least `least_s`.

    `wait` returns when a device has done what it was given.
    """
    run()
    calls = 1
    while _time(run, wait, calls) < least_s:
        calls *= 2
    return [_time(run, wait, calls) / calls for _ in range(repetitions)]


def _time(run: Callable[[], object], wait: Callable[[], object], calls: int) -> float:
    wait()
    started = time.perf_counter()
    for _ in range(calls):
        run()
    wait()
    return time.perf_counter() - started
