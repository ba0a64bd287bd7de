"""Plots over the steps of a sweep: latency against throughput and load, and the knee.

Lines go through the medians of steps of one load; dots beside them are the single steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from srm.loadtest.quantities import MEASURES, Scale, unit_for, value_of
from srm.loadtest.report import plots
from srm.loadtest.report.report import Report, RunReport
from srm.loadtest.report.tables import columns


def sweep_pictures(report: Report) -> list[plots.Picture]:
    """Return the plots of a sweep; none for a report of one run."""
    if len(report.runs) < 2:
        return []
    runs = by_load(report.runs)
    load = _load(runs)
    throughput = "output_tokens_per_s"
    pairs = (
        (throughput, ("ttft_p50", "ttft_p99"), "TTFT against throughput"),
        (throughput, ("itl_p50", "itl_p99"), "ITL against throughput"),
        (load, (throughput,), "Throughput against load"),
        (load, ("ttft_p50", "ttft_p99"), "TTFT against load"),
        (load, ("itl_p50", "itl_p99"), "ITL against load"),
        (load, ("good_share",), "Share of requests that meet the objectives"),
    )
    drawn = [
        _picture(runs, report, x, ys, title, f"sweep-{index}")
        for index, (x, ys, title) in enumerate(pairs)
    ]
    return [picture for picture in drawn if picture is not None]


def by_load(runs: Sequence[RunReport]) -> list[RunReport]:
    """Sort the runs by load, the order in which lines go through them."""
    return sorted(runs, key=lambda run: value_of(run.summary, _load(runs)))


def _repeats(runs: Sequence[RunReport]) -> list[list[int]]:
    """Group the indices of runs that were asked for the same load, in their order."""
    repeats: dict[float, list[int]] = {}
    for place, run in enumerate(runs):
        asked = run.scenario.rate if run.scenario.open_loop else run.scenario.concurrency
        repeats.setdefault(asked, []).append(place)
    return list(repeats.values())


def _load(runs: Sequence[RunReport]) -> str:
    """Return the key of the load measure: the rate in open loops, else the concurrency."""
    is_open = all(run.scenario.open_loop for run in runs)
    return "planned_per_s" if is_open else "concurrency"


def _picture(
    runs: list[RunReport], report: Report, x: str, ys: Sequence[str], title: str, name: str
) -> plots.Picture | None:
    across = [value_of(run.summary, x) for run in runs]
    up = {key: [value_of(run.summary, key) for run in runs] for key in ys}
    up = {key: values for key, values in up.items() if not all(map(math.isnan, values))}
    if not up:
        return None
    kind = MEASURES[ys[0]].kind
    heights = [value for values in up.values() for value in values]
    unit = unit_for(kind, heights)
    x_unit = unit_for(MEASURES[x].kind, across)
    label = x_unit.head(MEASURES[x].label.lower())
    label = "requests in flight, mean" if x == "concurrency" else label
    repeats = _repeats(runs)
    is_wide = kind == "seconds" and plots.is_wide(heights)
    with plots.axes_of(unit.name + (", log scale" if is_wide else ""), label) as axes:
        for (key, values), colour in zip(up.items(), (plots.FIRST, plots.SECOND), strict=False):
            places, ups = np.array(across) * x_unit.factor, np.array(values) * unit.factor
            if len(repeats) < len(runs):
                axes.plot(places, ups, "o", color=colour, markersize=2.5, alpha=0.45)
            axes.plot(
                [np.median(places[same]) for same in repeats],
                [np.median(ups[same]) for same in repeats],
                color=colour,
                marker="o",
                markersize=3.5,
                label=MEASURES[key].label,
            )
        plots.scale(axes, "y", 1.1, [value * unit.factor for value in heights], is_wide)
        is_long = x == "concurrency" and min(across) > 0 and plots.is_wide(across)
        plots.scale(axes, "x", 1.05, [value * x_unit.factor for value in across], is_long)
        plots.legend(axes)
        alt = f"{title}, {len(across)} steps. " + _describe(runs, up, unit)
        mark = "knee so far" if report.knee_may_lie_beyond else "knee"
        if report.knee is not None:
            alt += f" The {mark} is at {report.knee}."
        for run, place in zip(runs, across, strict=True):
            if run.summary.name == report.knee:
                at = place * x_unit.factor
                plots.mark(axes, at, mark, 0.98, True, "top", zorder=0)
        svg = plots.svg_of(axes, name, alt)
    data = [(MEASURES[x].label, x_unit, across)]
    data += [(MEASURES[key].label, unit, values) for key, values in up.items()]
    names = [run.summary.name for run in runs]
    return plots.Picture(title, svg, alt, columns(title, "Step", names, data))


def _describe(runs: list[RunReport], up: dict[str, list[float]], unit: Scale) -> str:
    first, last = runs[0].summary.name, runs[-1].summary.name
    lines = [
        f"{MEASURES[key].label} from {unit.write(values[0])} at {first} to "
        f"{unit.write(values[-1])} {unit.name} at {last}"
        for key, values in up.items()
    ]
    return f"{'; '.join(lines)}."
