"""Plots over time: of the client's view, of the server's metrics, and of the harness itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from srm.loadtest.quantities import Kind, unit_for
from srm.loadtest.report import plots
from srm.loadtest.report.report import RunReport
from srm.loadtest.report.tables import columns

ROWS = 24
"""Most rows in a timeline's table; each is a mean of the plotted values, or a maximum of maxima."""


class Curve(NamedTuple):
    """One series of a timeline; with `steps`, a value holds from its time until the next."""

    label: str
    colour: str
    times: Sequence[float]
    values: Sequence[float]
    steps: bool = True
    most: bool = False
    """Whether values are aggregated by their maximum, not by their mean."""


def timeline_pictures(run: RunReport, name: str) -> list[plots.Picture]:
    """Return the plots that have data."""
    client, server = run.timeline, run.server
    at = client.start_s

    def seen(label: str, colour: str, values: Sequence[float], most: bool = False) -> Curve:
        return Curve(label, colour, at, values, most=most)

    def draw(label: str, colour: str, values: Sequence[float]) -> Curve:
        return Curve(label, colour, server.time_s, values, steps=False)

    def counted(label: str, colour: str, values: Sequence[float]) -> Curve:
        middles = [(a + b) / 2 for a, b in pairwise([0.0, *server.time_s])]
        return Curve(label, colour, middles, values, steps=False)

    def source(*kinds: str) -> str:
        used = [server.names[column] for column in kinds if column in server.names]
        return f"Of the server: {', '.join(used)}." if used else ""

    received = seen("received by the client", plots.FIRST, client.output_tokens_per_s)
    made = counted("made by the server", plots.SECOND, server.output_tokens_per_s)
    pictures = [
        _picture(run, f"{name}-tokens", "Output tokens", "tokens_per_s", [received, made],
                 source("output_tokens")),
        _picture(run, f"{name}-flight", "Requests in flight", "count",
                 [seen("sent and not ended", plots.FIRST, client.in_flight)]),
        _picture(run, f"{name}-server", "Sequences in the server", "count",
                 [draw("running", plots.FIRST, server.running),
                  draw("waiting", plots.SECOND, server.waiting)], source("running", "waiting")),
        _picture(run, f"{name}-ended", "Requests ended", "requests_per_s",
                 [seen("whole", plots.FIRST, client.completed_per_s),
                  seen("failed", plots.BAD, client.errors_per_s)]),
        _picture(run, f"{name}-ttft-times", "TTFT by time of request", "seconds",
                 [seen("p50", plots.FIRST, client.ttft_p50),
                  seen("p99", plots.SECOND, client.ttft_p99, most=True)]),
        _picture(run, f"{name}-prompt", "Prompt tokens", "tokens_per_s",
                 [counted("taken by the server", plots.THIRD, server.prompt_tokens_per_s)],
                 source("prompt_tokens")),
        _picture(run, f"{name}-late", "How late the harness was, at worst", "seconds",
                 [seen("sending", plots.FIRST, client.lateness_max, most=True),
                  seen("event loop", plots.SECOND, client.lag_max, most=True)]),
        _picture(run, f"{name}-cpu", "CPU of the busiest client process", "share",
                 [seen("share of one core", plots.FIRST, client.cpu_share, most=True)]),
    ]  # fmt: skip
    return [picture for picture in pictures if picture is not None]


def _picture(
    run: RunReport, name: str, title: str, kind: Kind, lines: Sequence[Curve], note: str = ""
) -> plots.Picture | None:
    lines = [line for line in lines if any(not math.isnan(value) for value in line.values)]
    if not lines:
        return None
    everything = [value for line in lines for value in line.values]
    unit = unit_for(kind, everything)
    with plots.axes_of(unit.name, "seconds since the start") as axes:
        for line in lines:
            _draw(axes, line, unit.factor, run)
        _shade(axes, run)
        plots.scale(axes, "y", 1.08, [value * unit.factor for value in everything])
        plots.plain(axes.xaxis, 8)
        plots.legend(axes)
        alt = f"{title} over time. " + " ".join(
            f"{line.label.capitalize()}: {_range(line, unit.factor, unit.name)}." for line in lines
        )
        svg = plots.svg_of(axes, name, alt)
    ends = np.linspace(0, run.seconds, min(ROWS, max(1, len(lines[0].values))) + 1)
    data = [
        (f"{line.label}, most" if line.most else line.label, unit, _thinned(line, ends))
        for line in lines
    ]
    spans = [f"{a:.1f} to {b:.1f}" for a, b in pairwise(ends)]
    return plots.Picture(title, svg, alt, columns(title, "Seconds", spans, data), note)


def _draw(axes: plots.Panel, line: Curve, factor: float, run: RunReport) -> None:
    values = np.array(line.values) * factor
    if line.steps and len(values) <= 40:
        edges = np.append(line.times, run.seconds)
        axes.stairs(
            values, edges, color=line.colour, label=line.label, linewidth=1.6, baseline=None
        )
        return
    times = np.array(line.times) + (run.timeline.width_s / 2 if line.steps else 0)
    marker = "o" if len(values) == 1 else ""
    axes.plot(times, values, color=line.colour, label=line.label, marker=marker, markersize=4)


def _shade(axes: plots.Panel, run: RunReport) -> None:
    """Shade warm-up, cool-down and the end: all that is outside of the measured window."""
    end = max(run.seconds, run.summary.window[1])
    axes.set_xlim(0, end)
    low, high = run.summary.window
    for left, right in ((0.0, low), (high, end)):
        if right - left > end / 1000:
            axes.axvspan(left, right, color=plots.LINE, alpha=0.45, linewidth=0, zorder=0)


def _range(line: Curve, factor: float, unit: str) -> str:
    known = [value * factor for value in line.values if not math.isnan(value)]
    return f"from {min(known):.3g} to {max(known):.3g} {unit}".rstrip()


def _thinned(line: Curve, ends: np.ndarray) -> list[float]:
    places = np.clip(np.searchsorted(ends, line.times, "right") - 1, 0, len(ends) - 2)
    values = np.array(line.values)
    thinned = []
    for index in range(len(ends) - 1):
        inside = values[(places == index) & ~np.isnan(values)]
        summed = math.nan if not len(inside) else inside.max() if line.most else inside.mean()
        thinned.append(float(summed))
    return thinned
