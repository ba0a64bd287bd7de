"""Makes tables and pictures that set our figures beside the paper's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import mean, stdev

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return a table in Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return [f"| {' | '.join(line)} |".replace("|  |", "| |") for line in lines]


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Return mean and standard deviation."""
    return f"{mean(values):.{digits}f} ± {stdev(values):.{digits}f}"


def number(value: float | None, digits: int = 3) -> str:
    """Render a figure with `digits` decimals, and None as a dash."""
    return "–" if value is None else f"{value:.{digits}f}"


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
        middle = mean(ours[case])
        error = [[middle - min(ours[case])], [max(ours[case]) - middle]]
        colour = f"C{place % 10}"
        axes.errorbar(paper[case], middle, error, fmt="o", color=colour, capsize=3, label=case)
    axes.set(xlabel=f"{quantity}, the paper's", ylabel=f"{quantity}, ours")
    axes.grid(linewidth=0.3)
    axes.legend(fontsize=7)
