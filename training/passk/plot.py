"""Plots coverage against samples, with its power law, and against tokens."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from srm.errors import ConfigError
from srm.training.passk.results import CoveragePoint, Results
from srm.training.statistics.power_law import PowerLaw
from srm.training.text.whole_files import replace_file


def check_plots() -> None:
    """Raise ConfigError without matplotlib, before anything is sampled."""
    if find_spec("matplotlib") is None:
        raise ConfigError(
            f"plots of pass@k need matplotlib: {sys.executable} -m pip install matplotlib"
        )


def draw(results: Results, path: Path) -> None:
    """Write the plot as SVG; equal results give equal bytes."""
    mpl = import_module("matplotlib")
    figure = import_module("matplotlib.figure").Figure(figsize=(9, 3.6), layout="constrained")
    against_samples, against_tokens = figure.subplots(1, 2, sharey=True)
    points = results.points
    ks = [point.k for point in points]
    _curve(against_samples, ks, points)
    if (law := results.power_law) is not None:
        label = f"exp({law.a:.3g} · k^{law.b:.3g})"
        fitted = PowerLaw(law.a, law.b).coverage(ks)
        against_samples.plot(ks, fitted, "--", color="tab:red", label=label)
    against_samples.set(xlabel="samples of a problem, k", ylabel="coverage, pass@k", ylim=(0, 1.02))
    _curve(against_tokens, [point.completion_tokens for point in points], points)
    against_tokens.set(xlabel="tokens sampled of a problem, on average")
    for axes in (against_samples, against_tokens):
        axes.set_xscale("log")
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right")
    with mpl.rc_context({"svg.hashsalt": "srm"}), replace_file(path) as partial:
        figure.savefig(partial, format="svg", metadata={"Date": None})


def _curve(axes: Any, xs: Sequence[float], points: Sequence[CoveragePoint]) -> None:
    axes.plot(xs, [point.coverage for point in points], color="tab:blue", label="measured")
    over = [point.over_problems or point.over_samples for point in points]
    kind = "samples" if points[0].over_problems is None else "problems"
    low, high = [interval.low for interval in over], [interval.high for interval in over]
    axes.fill_between(xs, low, high, color="tab:blue", alpha=0.2, label=f"95 % over {kind}")
