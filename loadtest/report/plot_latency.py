"""Plots of one run's latencies: histograms, and percentiles out to p99.9."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from loadtest.quantities import DISTRIBUTIONS, Unit, number, unit_for
from loadtest.report.plots import (
    FIRST,
    SERIES,
    SOFT,
    Picture,
    axes_of,
    legend,
    logarithmic,
    percentile_axis,
    plain,
    svg_of,
)
from loadtest.report.report import Buckets, RunReport
from loadtest.report.tables import columns

BARS = 48
_PERCENTILES = np.array([0.0, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999])


def latency_pictures(run: RunReport, name: str) -> list[Picture]:
    """Return histograms of TTFT, ITL and E2E, and one plot with percentiles of all three."""
    shown: list[str] = [measure for measure in ("ttft", "itl", "e2e") if measure in run.histograms]
    pictures = [_histogram(run, measure, f"{name}-{measure}") for measure in shown]
    return [*pictures, _percentiles(run, shown, f"{name}-percentiles")] if shown else []


def _histogram(run: RunReport, measure: str, name: str) -> Picture:
    buckets, distribution = run.histograms[measure], getattr(run.summary, measure)
    unit = unit_for("seconds", [distribution.p99])
    starts, ends = np.array([buckets.start_s, buckets.end_s]) * unit.factor
    middles = (starts + ends) / 2
    counts = np.array(buckets.counts, dtype=np.float64)
    edges = _edges(middles)
    bars, _ = np.histogram(middles, edges, weights=counts)
    shares = 100 * bars / counts.sum()
    label = DISTRIBUTIONS[measure]
    of = "gaps between tokens" if measure == "itl" else "replies"
    with axes_of(f"% of {of}", f"{label} ({unit.name}), log scale") as axes:
        axes.stairs(shares, edges, fill=True, color=FIRST, alpha=0.35)
        axes.stairs(shares, edges, color=FIRST)
        axes.set_xlim(edges[0], edges[-1])
        axes.set_ylim(0, 1.18 * shares.max())
        logarithmic(axes, "x")
        plain(axes.yaxis, 5)
        axes.grid(axis="x", visible=False)
        top = axes.get_ylim()[1]
        ends = np.log(edges[[0, -1]])
        for at, text, up in (
            (distribution.p50, "p50", 0.93),
            (distribution.p99, "p99", 0.93),
            (distribution.p999, "p99.9", 0.82),
        ):
            place = at * unit.factor
            axes.axvline(place, ymax=up + 0.03, color=SOFT, linewidth=1, linestyle=(0, (2, 2)))
            right = (np.log(max(place, edges[0])) - ends[0]) / (ends[1] - ends[0]) > 0.85
            axes.annotate(
                text,
                (place, top * up),
                (-3 if right else 3, 0),
                textcoords="offset points",
                ha="right" if right else "left",
                color=SOFT,
                fontsize=8,
            )
        alt = (
            f"Histogram of {label}: half within {unit.write(distribution.p50)} {unit.name}, "
            f"99 % within {unit.write(distribution.p99)}, "
            f"the longest {unit.write(distribution.max)}."
        )
        svg = svg_of(axes, name, alt)
    ranges = [f"{number(a)} to {number(b)}" for a, b in pairwise(edges)]
    shown = [index for index, share in enumerate(shares) if share]
    data = [
        ("Count", Unit("", 1), [float(bars[index]) for index in shown]),
        ("Share", Unit("%", 1), [float(shares[index]) for index in shown]),
    ]
    table = columns(f"{label}", unit.head("From, to"), [ranges[index] for index in shown], data)
    return Picture(f"{label}: histogram", svg, alt, table)


def _edges(middles: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return log-spaced edges; wide enough to be seen if all values are alike."""
    low, high = max(float(middles.min()), 1e-9) * 0.97, max(float(middles.max()), 1e-9) * 1.03
    if high < 2 * low:
        middle = (low * high) ** 0.5
        low, high = min(low, middle / 1.5), max(high, middle * 1.5)
    return np.geomspace(low, high, BARS + 1)


def _percentiles(run: RunReport, shown: list[str], name: str) -> Picture:
    """Plot time by rank on an axis of 1 / (1 - rank), so that each further nine is as wide."""
    unit = unit_for("seconds", [getattr(run.summary, measure).p99 for measure in shown])
    with axes_of(f"{unit.name}, log scale", "percentile") as axes:
        ranks = percentile_axis(axes)
        for measure, colour in zip(shown, SERIES, strict=False):
            values = at_ranks(run.histograms[measure], ranks) * unit.factor
            axes.plot(1 / (1 - ranks), values, color=colour, label=DISTRIBUTIONS[measure])
        logarithmic(axes, "y")
        legend(axes)
        said = [
            f"{DISTRIBUTIONS[m]} p99.9 {unit.write(getattr(run.summary, m).p999)}" for m in shown
        ]
        alt = f"Time by percentile ({unit.name}): {', '.join(said)}."
        svg = svg_of(axes, name, alt)
    data = [
        (
            DISTRIBUTIONS[m],
            unit,
            at_ranks(run.histograms[m], _PERCENTILES).tolist(),
        )
        for m in shown
    ]
    table = columns("Percentiles", "Percentile", [f"p{100 * p:g}" for p in _PERCENTILES], data)
    return Picture("Percentiles", svg, alt, table)


def at_ranks(buckets: Buckets, ranks: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the upper ends of the buckets that contain the ranks."""
    reached = np.cumsum(buckets.counts)
    places = np.searchsorted(reached, np.maximum(ranks * reached[-1], 1e-9))
    found: NDArray[np.float64] = np.array(buckets.end_s)[np.minimum(places, len(reached) - 1)]
    return found
