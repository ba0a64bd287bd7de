"""Confidence intervals of a run's measures, and of differences between two runs.

A window is cut into BATCHES equal parts in time. With θ the measure over the whole window and θᵢ
over part i, its standard error is s/√k, s² = Σ(θᵢ - θ)²/(k - 1), k = BATCHES: for means this is the
method of batch means, for medians that of sectioning (Asmussen and Glynn, Stochastic Simulation,
III.5a; Nakayama 2014). Parts are long enough to be nearly independent, which single requests in a
queue are not; a bootstrap over requests would therefore give intervals that are too narrow.

The difference of runs a and b has the interval (θb - θa) ± T·√(sa²/k + sb²/k), where T is Student's
0.975 quantile with k - 1 degrees of freedom, the fewest that Welch's formula can give. This knows
only what varies within the runs, not between them; therefore less than SMALLEST of the first value
is never called a difference.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec
import numpy as np

from srm.loadtest.analysis.measures import is_whole
from srm.loadtest.analysis.observed import Observed
from srm.loadtest.recording import Times

BATCHES = 10
STUDENT = 2.262
"""Student's 0.975 quantile with 9 degrees of freedom."""
FEWEST = 10
"""Values that each part needs for its median to be meaningful."""
SMALLEST = 0.02
"""The least relative difference: runs of one server often differ by a percent or two."""

ESTIMATED = ("output_tokens_per_s", "completed_per_s", "ttft_p50", "itl_p50", "e2e_p50")
"""Measures with confidence intervals. Tails have none: a part has too few values in them."""

Verdict = Literal["more", "less", "no clear difference", "not tested"]


class Difference(msgspec.Struct, frozen=True):
    """The interval of b - a for one measure. Limits are NaN if it was not tested."""

    low: float
    high: float
    verdict: Verdict


def parts(observed: Observed) -> dict[str, list[float]]:
    """Return the measures of ESTIMATED in each part of the window; empty if parts are too short.

    A part is too short if it is shorter than the median request, since what happens in one part
    then goes on in the next.
    """
    window = observed.window
    edges = np.linspace(*window, BATCHES + 1)
    length = (window[1] - window[0]) / BATCHES
    e2e = observed.e2e().value
    if not len(e2e) or length <= 0 or np.median(e2e) > length:
        return {}
    chunks, requests = observed.chunks, observed.recording.requests
    tokens, _ = np.histogram(chunks.time, edges, weights=chunks.tokens * chunks.scale)
    completed, _ = np.histogram(requests["ended"][is_whole(requests)], edges)
    rates = {"output_tokens_per_s": tokens / length, "completed_per_s": completed / length}
    medians = {"ttft": observed.ttft(), "itl": observed.itl(), "e2e": observed.e2e()}
    for name, values in medians.items():
        place = np.clip(np.searchsorted(edges, values.time, "right") - 1, 0, BATCHES - 1)
        if np.bincount(place, minlength=BATCHES).min() >= FEWEST:
            inside = [place == number for number in range(BATCHES)]
            medians_of = [weighted_median(values.value[i], values.weight[i]) for i in inside]
            rates[f"{name}_p50"] = np.array(medians_of)
    return {key: [float(value) for value in values] for key, values in rates.items()}


def weighted_median(values: Times, weights: Times) -> float:
    """Return the least value at or below which half of the weight lies."""
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(reached, reached[-1] / 2)])


def standard_error(value: float, of_parts: list[float]) -> float:
    """Return s/√k as defined in the module's docstring."""
    k = len(of_parts)
    return math.sqrt(math.fsum((part - value) ** 2 for part in of_parts) / (k - 1) / k)


def difference(a: float, b: float, parts_a: list[float], parts_b: list[float]) -> Difference:
    """Test whether b is more or less than a; not tested if either has no parts."""
    if not parts_a or not parts_b or not math.isfinite(b - a):
        return Difference(math.nan, math.nan, "not tested")
    margin = STUDENT * math.hypot(standard_error(a, parts_a), standard_error(b, parts_b))
    low, high = b - a - margin, b - a + margin
    if low <= 0 <= high or abs(b - a) < SMALLEST * abs(a):
        return Difference(low, high, "no clear difference")
    return Difference(low, high, "more" if b > a else "less")
