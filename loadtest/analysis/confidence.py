"""How sure a measure of one run is, and a difference between two: batch means and quantiles.

A window is cut into BATCHES equal parts in time. With θ the measure over the whole window and θᵢ
over part i, its standard error is s/√k, s² = Σ(θᵢ - θ)²/(k - 1), k = BATCHES: for means this is the
method of batch means, for medians that of sectioning (Asmussen and Glynn, Stochastic Simulation,
III.5a; Nakayama 2014). Parts are long enough to be nearly independent, which single requests in a
queue are not; so a bootstrap over requests would be too sure of itself.

The difference of runs a and b has the interval (θb - θa) ± T·√(sa²/k + sb²/k), where T is Student's
0.975 quantile with k - 1 degrees of freedom, the fewest that Welch's formula can give. This knows
what varies inside of the runs only, not what varies between them; therefore less than SMALLEST of
the first value is never called a difference.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from loadtest.analysis.observed import Observed
from loadtest.recording import ERRORS

BATCHES = 10
STUDENT = 2.262
"""Of 9 degrees of freedom."""
FEWEST = 10
"""Values that each part must have, for its median to say something."""
SMALLEST = 0.02
"""Runs of one server on one machine often differ by a percent or two."""

ESTIMATED = ("output_tokens_per_s", "completed_per_s", "ttft_p50", "itl_p50", "e2e_p50")
"""Measures that are estimated so; tails are not: a part has too few values in them."""

Verdict = Literal["more", "less", "no clear difference", "not tested"]


class Difference(msgspec.Struct, frozen=True):
    """Of a measure, b - a. Limits are NaN where it was not tested."""

    low: float
    high: float
    verdict: Verdict


def parts(observed: Observed) -> dict[str, list[float]]:
    """The measures of ESTIMATED in each part of the window; nothing if parts are too short.

    Too short is: shorter than half of the requests take, since what happens in one part then goes
    on in the next.
    """
    window = observed.window
    edges = np.linspace(*window, BATCHES + 1)
    length = (window[1] - window[0]) / BATCHES
    e2e = observed.e2e().value
    if not len(e2e) or length <= 0 or np.median(e2e) > length:
        return {}
    chunks, requests = observed.chunks, observed.recording.requests
    whole = requests["error"] == ERRORS.index("none")
    tokens, _ = np.histogram(chunks.time, edges, weights=chunks.tokens * chunks.scale)
    completed, _ = np.histogram(requests["ended"][whole], edges)
    found = {
        "output_tokens_per_s": tokens / length,
        "completed_per_s": completed / length,
    }
    medians = {"ttft": observed.ttft(), "itl": observed.itl(), "e2e": observed.e2e()}
    for name, values in medians.items():
        place = np.clip(np.searchsorted(edges, values.time, "right") - 1, 0, BATCHES - 1)
        if np.bincount(place, minlength=BATCHES).min() >= FEWEST:
            found[f"{name}_p50"] = np.array(
                [
                    weighted_median(values.value[place == i], values.weight[place == i])
                    for i in range(BATCHES)
                ]
            )
    return {key: [float(value) for value in values] for key, values in found.items()}


def weighted_median(values: NDArray[np.float64], weights: NDArray[np.float64]) -> float:
    """The least value that half of the weight is not above."""
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(reached, reached[-1] / 2)])


def standard_error(value: float, of_parts: list[float]) -> float:
    """s/√k of the module's text."""
    k = len(of_parts)
    return math.sqrt(math.fsum((part - value) ** 2 for part in of_parts) / (k - 1) / k)


def difference(a: float, b: float, parts_a: list[float], parts_b: list[float]) -> Difference:
    """Whether b is more or less than a; not tested where either has no parts."""
    if not parts_a or not parts_b or not math.isfinite(b - a):
        return Difference(math.nan, math.nan, "not tested")
    margin = STUDENT * math.hypot(standard_error(a, parts_a), standard_error(b, parts_b))
    low, high = b - a - margin, b - a + margin
    if low <= 0 <= high or abs(b - a) < SMALLEST * abs(a):
        return Difference(low, high, "no clear difference")
    return Difference(low, high, "more" if b > a else "less")
