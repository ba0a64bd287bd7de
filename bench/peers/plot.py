"""Draws the record of a comparison, from its data alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
import msgspec

mpl.use("svg")  # no display needed
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from bench.peers.result import Result

_OURS, _THEIRS, _PLAIN = "tab:blue", "tab:gray", "tab:green"


def draw(record: dict[str, Any], path: Path) -> None:
    """Draw the best tok/s over HTTP and offline, and tok/s by concurrent sequences."""
    results = [one for one in msgspec.convert(record["results"], list[Result]) if one.best]
    ways = [how for how in ("http", "offline") if any(one.how == how for one in results)]
    rows = max((sum(one.how == how for one in results) for how in ways), default=1)
    figure, grid = plt.subplots(
        2, max(1, len(ways)), figsize=(7 * max(1, len(ways)), 4 + 0.28 * rows), squeeze=False
    )
    for column, how in enumerate(ways):
        chosen = sorted((one for one in results if one.how == how), key=_rate)
        _draw_best(chosen, how, grid[0, column])
        _draw_points(chosen, grid[1, column])
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def _rate(result: Result) -> float:
    return result.best.tokens_per_s if result.best else 0.0


def _colour(result: Result) -> str:
    if result.version == "this commit":
        return _OURS
    return _PLAIN if result.model.startswith("srm") else _THEIRS


def _draw_best(results: list[Result], how: str, axes: Axes) -> None:
    names = [f"{one.engine}: {one.model}" for one in results]
    rates = [_rate(one) for one in results]
    bars = axes.barh(names, rates, color=[_colour(one) for one in results])
    axes.bar_label(bars, [f" {rate:,.0f}" for rate in rates], fontsize=7)
    axes.set(title=f"best tok/s, {how}", xscale="log")
    axes.tick_params(axis="y", labelsize=7)
    axes.margins(x=0.15)


def _draw_points(results: list[Result], axes: Axes) -> None:
    for one in reversed(results):
        ordered = sorted(one.points, key=lambda point: point.concurrency)
        axes.plot(
            [point.concurrency for point in ordered],
            [point.tokens_per_s for point in ordered],
            marker=".",
            linewidth=1.2 if one.version == "this commit" else 0.7,
            label=f"{one.engine}: {one.model}",
        )
    axes.set(xlabel="sequences at once", ylabel="tok/s", yscale="log")
    axes.set_xscale("log", base=2)
    axes.grid(which="major", linewidth=0.3)
    axes.legend(fontsize=5)
