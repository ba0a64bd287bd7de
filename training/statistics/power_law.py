"""The power law of coverage: c(k) = exp(a * k**b), with a < 0 and, where more samples help, b < 0.

So the negative log of coverage is a power of k: the exponentiated power law of "Large Language
Monkeys" (Brown et al. 2024, https://arxiv.org/abs/2407.21787). Here a and b are those of the least
squared error of the coverage itself: its logarithm would count most where coverage is least sure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from srm.training.statistics.coverage import Floats

_STEPS = 100
"""Most steps of a fit, more than any fit of a rising curve has needed."""
_SMALLEST = 1e-12
"""Damping, relative to the curvature, below which a fit has converged."""


class PowerLaw(NamedTuple):
    """c(k) = exp(a * k**b)."""

    a: float
    b: float

    def coverage(self, ks: Sequence[int]) -> Floats:
        """Return the coverage at each k, which may lie beyond the fitted range."""
        coverage: Floats = np.exp(self.a * np.array(ks, float) ** self.b)
        return coverage


def fit(ks: Sequence[int], coverage: Floats, start: PowerLaw | None = None) -> PowerLaw | None:
    """Fit the law to the coverage at each k, by Levenberg and Marquardt's method.

    Returns None where no law can be fitted: fewer than three values of k, the same coverage at all
    of them, or a step, whose law would be infinite.
    """
    if len(ks) < 3 or np.ptp(coverage) == 0:
        return None
    x = np.log(ks)
    # c = exp(-exp(p + b x)): a straight line of log(-log c), which is where the search begins
    if start is None:
        inner = np.clip(coverage, 1e-4, 1 - 1e-4)
        at = np.polyfit(x, np.log(-np.log(inner)), 1)[::-1]
    else:
        at = np.array([np.log(-start.a), start.b])
    damping, error = 1e-3, _error(at, x, coverage)
    for _ in range(_STEPS):
        with np.errstate(over="ignore", invalid="ignore"):
            hazard = np.exp(at[0] + at[1] * x)
            slope = np.nan_to_num(-np.exp(-hazard) * hazard)  # of c by p; by b x times as much
        jacobian = np.stack([slope, slope * x], axis=1)
        curvature = jacobian.T @ jacobian
        gradient = jacobian.T @ (coverage - np.exp(-hazard))
        damped = curvature + damping * np.diag(np.diag(curvature) + 1e-30)
        step = np.linalg.solve(damped, gradient)
        if (new := _error(at + step, x, coverage)) < error:
            at, error, damping = at + step, new, max(damping / 10, _SMALLEST)
            if np.abs(step).max() < 1e-10:
                break
        elif (damping := damping * 10) > 1 / _SMALLEST:
            break
    with np.errstate(over="ignore"):
        law = PowerLaw(float(-np.exp(at[0])), float(at[1]))
    return law if math.isfinite(law.a) and math.isfinite(law.b) else None


def _error(at: Floats, x: Floats, coverage: Floats) -> float:
    with np.errstate(over="ignore"):
        return float(np.square(coverage - np.exp(-np.exp(at[0] + at[1] * x))).sum())


def fits(ks: Sequence[int], means: Floats, start: PowerLaw) -> list[PowerLaw]:
    """Fit each row of resampled coverage; rows that no law can be fitted to are left out. Of few
    problems many rows are equal, and are fitted once."""
    rows, places = np.unique(means, axis=0, return_inverse=True)
    fitted = [fit(ks, row, start) for row in rows]
    return [law for place in places.ravel() if (law := fitted[place]) is not None]
