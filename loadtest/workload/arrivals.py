"""Arrival times of an open loop's requests: absolute, all known before the run.

So a server that stalls cannot delay them.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from srm.errors import ConfigError
from srm.loadtest import trace
from srm.loadtest.counter_rng import ARRIVALS, Draws, shares
from srm.loadtest.scenario import Scenario

MOST = 100_000_000
"""Most requests of one run; their times alone are 800 MB."""
_CHUNK = 65_536

Times = NDArray[np.float64]


def times(scenario: Scenario) -> Times:
    """Return when an open loop's requests are planned [requests], in seconds since the start,
    sorted.

    All are before `duration_s`, if that is not 0, and at most `requests`, if that is not 0. Raises
    ConfigError for a trace that cannot be read, and for more than MOST.
    """
    assert scenario.open_loop, f"{scenario.arrivals}: a closed loop plans no times"
    planned: Times
    if scenario.arrivals == "trace":
        assert scenario.trace is not None
        timestamps = np.array([line.timestamp for line in trace.read(scenario.trace)])
        planned = (timestamps - timestamps[0]) * scenario.trace_scale
    elif scenario.arrivals == "constant":
        planned = np.arange(_most(scenario, scenario.rate)) / scenario.rate
    elif scenario.arrivals == "ramp":
        planned = _ramp(scenario)
    else:
        planned = _poisson(scenario)
    if scenario.duration_s:
        planned = planned[: np.searchsorted(planned, scenario.duration_s)]
    return planned[: scenario.requests or None]


def _most(scenario: Scenario, mean_rate: float) -> int:
    """Return how many requests there are at this mean rate, perhaps one too many.

    Raises ConfigError for more than MOST.
    """
    limits = [scenario.requests] if scenario.requests else []
    if scenario.duration_s:
        limits.append(math.ceil(min(mean_rate * scenario.duration_s, 2.0 * MOST)) + 1)
    if min(limits) > MOST:
        raise ConfigError(f"rate, duration_s and requests give more than {MOST} requests")
    return min(limits)


def _ramp(scenario: Scenario) -> Times:
    """Return the times at which rate·t + (rate_end - rate)·t² / (2·duration_s), the rate's
    integral, is 0, 1, 2, …"""
    first, last = scenario.rate, scenario.rate_end
    curve = (last - first) / (2 * scenario.duration_s)
    count = np.arange(_most(scenario, (first + last) / 2))
    under_root = first * first + 4 * curve * count
    count = count[under_root > 0]  # a falling rate's integral has an end
    planned: Times = 2 * count / (first + np.sqrt(under_root[: len(count)]))
    return planned


def _poisson(scenario: Scenario) -> Times:
    """Return sums of exponential gaps: -ln(u) / rate.

    The random numbers do not depend on rate, duration and number: a longer run extends a shorter
    one. But if the first request would come after `duration_s`, its number is mapped to those of
    earlier ones: these are the times of a Poisson process of which it is known that one came.
    """
    _most(scenario, scenario.rate)  # refuses too many before any is drawn
    draws, gaps, total = Draws(scenario.seed or 0), list[Times](), 0.0
    requests, duration = scenario.requests or math.inf, scenario.duration_s or math.inf
    none_came = math.exp(-scenario.rate * duration)
    while len(gaps) * _CHUNK < requests and total / scenario.rate < duration:
        drawn = shares(draws.raw(ARRIVALS, len(gaps), _CHUNK))
        if not gaps and drawn[0] <= none_came:
            drawn[0] = none_came + drawn[0] / none_came * (1 - none_came)
        gaps.append(-np.log(drawn))
        total += float(gaps[-1].sum())
    return np.cumsum(np.concatenate(gaps)) / scenario.rate
