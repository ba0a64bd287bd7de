"""Makes tables and pictures that set our figures beside the paper's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import mean, stdev
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from research.experiments.harness.result_cache import Numbers

AVERAGED = 5
"""Number of first and of last updates whose mean reward is shown."""


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |".replace("|  |", "| |") for line in lines)


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Return mean and standard deviation, as every page says; of a single value the value."""
    deviation = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{mean(values):.{digits}f}{deviation}"


def number(value: float | None, digits: int = 3) -> str:
    """Render a figure with `digits` decimals, and None as a dash."""
    return "–" if value is None else f"{value:.{digits}f}"


def minutes_of(results: Mapping[str, Sequence[Numbers]]) -> str:
    """Say what all cases took."""
    spent = sum(run["processor_seconds"] for runs in results.values() for run in runs)
    return f"All cases took {spent / 60:.0f} processor minutes."


def first_and_last(seeds: Sequence[Numbers], digits: int = 3) -> list[str]:
    """Render the mean rewards of the first and of the last updates."""
    parts = slice(AVERAGED), slice(-AVERAGED, None)
    return [f"{mean(mean(seed['rewards'][part]) for seed in seeds):.{digits}f}" for part in parts]


def draw_lines(
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]], axes: Axes, **labels: Any
) -> None:
    """Draw a line for each name, of x and y; `labels` are those of the axes."""
    for name, points in lines.items():
        axes.plot(*points, marker=".", label=name)
    finish(axes, **labels)


def finish(axes: Axes, **labels: Any) -> None:
    """Label the axes, and explain what is drawn."""
    axes.set(**labels)
    axes.grid(linewidth=0.3)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize=7)


def beside(
    ours: Mapping[str, Sequence[float]], paper: Mapping[str, float], quantity: str
) -> Figure:
    """Draw a point for each case that the paper has, as `points` does."""
    figure, axes = plt.subplots(figsize=(7, 5))
    points(axes, ours, paper, quantity)
    return figure


def points(
    axes: Axes, ours: Mapping[str, Sequence[float]], paper: Mapping[str, float], quantity: str
) -> None:
    """Draw a point for each case that the paper has: its figure, and the mean and range of ours."""
    for place, case in enumerate(name for name in ours if name in paper):
        ranged(axes, [paper[case]], [ours[case]], fmt="o", color=f"C{place % 10}", label=case)
    finish(axes, xlabel=f"{quantity}, the paper's", ylabel=f"{quantity}, ours")


def ranged(axes: Axes, xs: Sequence[float], ours: Sequence[Sequence[float]], **style: Any) -> None:
    """Draw at each x the mean and range of ours."""
    means = [mean(values) for values in ours]
    ends = [[mean(values) - min(values) for values in ours]]
    ends += [[max(values) - mean(values) for values in ours]]
    axes.errorbar(xs, means, ends, capsize=3, **style)
