"""What a client must see of a server whose behaviour is known, computed request by request.

All times are seconds of one clock. Nothing here knows the harness.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tests.kit.loads.fault_proxy import Stall

Times = NDArray[np.float64]


def through(times: Times, stall: Stall) -> Times:
    """When what comes at these times gets through a stall; what begins it is held by it."""
    return np.where((times > stall.begin - 1e-6) & (times < stall.end), stall.end, times)


def received(planned: Times, tokens: int, ttft_s: float, itl_s: float, stall: Stall) -> Times:
    """[requests, tokens]: when each token is received, with a slot for everyone."""
    begun = through(planned, stall)
    offsets = ttft_s + itl_s * np.arange(tokens)
    return through(begun[:, None] + offsets, stall)


def queued(planned: Sequence[float], slots: int, service_s: float) -> Times:
    """[requests]: when the service of each begins, of so many slots, first come first served."""
    free, begun = [0.0] * slots, []
    for time in planned:
        begin = max(time, heapq.heappop(free))
        begun.append(begin)
        heapq.heappush(free, begin + service_s)
    return np.array(begun)
