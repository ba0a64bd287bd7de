"""Plots of two reports in one figure: curves of sweeps, percentiles of single runs."""

from __future__ import annotations

from srm.loadtest.quantities import DISTRIBUTIONS, MEASURES, statistic_name, unit_for, value_of
from srm.loadtest.report import plots
from srm.loadtest.report.compare import Comparison
from srm.loadtest.report.plot_latency import at_ranks
from srm.loadtest.report.plot_sweep import by_load
from srm.loadtest.report.report import RunReport
from srm.loadtest.report.tables import columns

_MEASURES = ("ttft", "itl", "e2e")


def comparison_pictures(comparison: Comparison) -> list[plots.Picture]:
    """Plot TTFT, ITL and E2E: against throughput if there are several steps, else by percentile."""
    if not comparison.steps:
        return []
    sides = {
        comparison.label_a: by_load([step.a for step in comparison.steps]),
        comparison.label_b: by_load([step.b for step in comparison.steps]),
    }
    draw = _percentiles if len(comparison.steps) == 1 else _curves
    return [
        draw(sides, measure, f"both-{measure}")
        for measure in _MEASURES
        if all(measure in run.histograms for runs in sides.values() for run in runs)
    ]


def _percentiles(sides: dict[str, list[RunReport]], measure: str, name: str) -> plots.Picture:
    label = DISTRIBUTIONS[measure]
    tails = [getattr(runs[0].summary, measure).p99 for runs in sides.values()]
    unit = unit_for("seconds", tails)
    buckets = {side: runs[0].histograms[measure] for side, runs in sides.items()}
    curves = {side: at_ranks(bucket, unit.factor) for side, bucket in buckets.items()}
    pairs = zip(sides, tails, strict=True)
    lines = [f"{side} p99 {unit.write(p99)} {unit.name}" for side, p99 in pairs]
    alt = f"{label} by percentile of both: {', '.join(lines)}."
    svg = plots.percentile_curves(curves, unit.name, name, alt)
    shown = ("p50", "p90", "p95", "p99", "p999", "max")
    data = [
        (side, unit, [float(getattr(getattr(runs[0].summary, measure), p)) for p in shown])
        for side, runs in sides.items()
    ]
    table = columns(label, "Percentile", [statistic_name(p) for p in shown], data)
    return plots.Picture(f"{label} by percentile", svg, alt, table)


def _curves(sides: dict[str, list[RunReport]], measure: str, name: str) -> plots.Picture:
    label, key = DISTRIBUTIONS[measure], f"{measure}_p99"
    across = {s: [r.summary.output_tokens_per_s for r in runs] for s, runs in sides.items()}
    up = {s: [value_of(r.summary, key) for r in runs] for s, runs in sides.items()}
    x_unit = unit_for("tokens_per_s", [x for values in across.values() for x in values])
    heights = [y for values in up.values() for y in values]
    unit, is_wide = unit_for(MEASURES[key].kind, heights), plots.is_wide(heights)
    above = f"{unit.name}, log scale" if is_wide else unit.name
    with plots.axes_of(above, x_unit.head("output tokens")) as axes:
        for side, colour in zip(sides, (plots.FIRST, plots.SECOND), strict=True):
            x = [value * x_unit.factor for value in across[side]]
            y = [value * unit.factor for value in up[side]]
            axes.plot(x, y, color=colour, marker="o", markersize=3.5, label=side)
        plots.scale(axes, "y", 1.1, [y * unit.factor for y in heights], is_wide)
        axes.set_xlim(left=0)
        plots.plain(axes.xaxis)
        plots.legend(axes)
        alt = f"{label} p99 against throughput, both sweeps: {', '.join(sides)}."
        svg = plots.svg_of(axes, name, alt)
    names = [f"{run.summary.name}, {side}" for side, runs in sides.items() for run in runs]
    data = [
        ("Output tokens", x_unit, [x for values in across.values() for x in values]),
        (f"{label} p99", unit, heights),
    ]
    title = f"{label} p99 against throughput"
    return plots.Picture(title, svg, alt, columns(title, "Step", names, data))
