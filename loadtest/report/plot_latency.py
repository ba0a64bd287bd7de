"""Plots of one run's latencies: histograms, and percentiles out to p99.9."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from srm.loadtest.quantities import DISTRIBUTIONS, Scale, number, unit_for
from srm.loadtest.recording import Times
from srm.loadtest.report import plots
from srm.loadtest.report.report import Buckets, RunReport
from srm.loadtest.report.tables import columns

BARS = 48
_PERCENTILES = np.array([0.0, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999])


def latency_pictures(run: RunReport, name: str) -> list[plots.Picture]:
    """Return histograms of TTFT, ITL and E2E, and one plot with percentiles of all three."""
    shown: list[str] = [measure for measure in ("ttft", "itl", "e2e") if measure in run.histograms]
    pictures = [_histogram(run, measure, f"{name}-{measure}") for measure in shown]
    return [*pictures, _percentiles(run, shown, f"{name}-percentiles")] if shown else []


def _histogram(run: RunReport, measure: str, name: str) -> plots.Picture:
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
    with plots.axes_of(f"% of {of}", f"{label} ({unit.name}), log scale") as axes:
        axes.stairs(shares, edges, fill=True, color=plots.FIRST, alpha=0.35)
        axes.stairs(shares, edges, color=plots.FIRST)
        axes.set_xlim(edges[0], edges[-1])
        axes.set_ylim(0, 1.18 * shares.max())
        plots.logarithmic(axes, "x")
        plots.plain(axes.yaxis, 5)
        axes.grid(axis="x", visible=False)
        low, high = np.log(edges[[0, -1]])
        for at, text, up in (
            (distribution.p50, "p50", 0.93),
            (distribution.p99, "p99", 0.93),
            (distribution.p999, "p99.9", 0.82),
        ):
            place = at * unit.factor
            is_right = (np.log(max(place, edges[0])) - low) / (high - low) > 0.85
            plots.mark(axes, place, text, up, is_right, ymax=up + 0.03)
        alt = (
            f"Histogram of {label}: half within {unit.write(distribution.p50)} {unit.name}, "
            f"99 % within {unit.write(distribution.p99)}, "
            f"the longest {unit.write(distribution.max)}."
        )
        svg = plots.svg_of(axes, name, alt)
    ranges = [f"{number(a)} to {number(b)}" for a, b in pairwise(edges)]
    shown = [index for index, share in enumerate(shares) if share]
    data = [
        ("Count", Scale("", 1), [float(bars[index]) for index in shown]),
        ("Share", Scale("%", 1), [float(shares[index]) for index in shown]),
    ]
    table = columns(f"{label}", unit.head("From, to"), [ranges[index] for index in shown], data)
    return plots.Picture(f"{label}: histogram", svg, alt, table)


def _edges(middles: Times) -> Times:
    """Return log-spaced edges; wide enough to be seen if all values are alike."""
    low, high = max(float(middles.min()), 1e-9) * 0.97, max(float(middles.max()), 1e-9) * 1.03
    if high < 2 * low:
        middle = (low * high) ** 0.5
        low, high = min(low, middle / 1.5), max(high, middle * 1.5)
    return np.geomspace(low, high, BARS + 1)


def _percentiles(run: RunReport, shown: list[str], name: str) -> plots.Picture:
    unit = unit_for("seconds", [getattr(run.summary, measure).p99 for measure in shown])
    buckets = {DISTRIBUTIONS[m]: run.histograms[m] for m in shown}
    curves = {label: at_ranks(bucket, unit.factor) for label, bucket in buckets.items()}
    lines = [f"{DISTRIBUTIONS[m]} p99.9 {unit.write(getattr(run.summary, m).p999)}" for m in shown]
    alt = f"Time by percentile ({unit.name}): {', '.join(lines)}."
    svg = plots.percentile_curves(curves, unit.name, name, alt)
    data = [(label, unit, at_ranks(b, 1.0)(_PERCENTILES).tolist()) for label, b in buckets.items()]
    table = columns("Percentiles", "Percentile", [f"p{100 * p:g}" for p in _PERCENTILES], data)
    return plots.Picture("Percentiles", svg, alt, table)


def at_ranks(buckets: Buckets, factor: float) -> plots.Curve:
    """Return the function from ranks to the upper ends of the buckets that contain them, scaled."""
    reached, ends = np.cumsum(buckets.counts), np.array(buckets.end_s) * factor

    def times(ranks: Times) -> Times:
        places = np.searchsorted(reached, np.maximum(ranks * reached[-1], 1e-9))
        reached_at: Times = ends[np.minimum(places, len(reached) - 1)]
        return reached_at

    return times
