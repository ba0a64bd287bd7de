"""A record of `srm bench engine` as a picture."""

from __future__ import annotations

from typing import Any

import matplotlib as mpl

mpl.use("svg")  # no display needed
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLOURS = {"srm": "tab:blue", "PyTorch compiled": "tab:orange", "PyTorch eager": "tab:gray"}
DASHES = {"float32": "--", "bfloat16": "-"}


def draw_engine(record: dict[str, Any]) -> Figure:
    """Per model: tokens a second by batch size, and below the fraction of the dtype's GEMM peak."""
    models = record["models"]
    size = (4 * len(models), 6)
    figure, grid = plt.subplots(2, len(models), figsize=size, sharex="col", squeeze=False)
    for model, rates, shares in zip(models, *grid, strict=True):
        rates.set(title=model["name"], yscale="log")
        shares.set(xlabel="sequences that decode at once", ylim=(0, 1))
        for run in model["runs"]:
            _plot_run(record, model, run, rates, shares)
        for axes in (rates, shares):
            axes.set_xscale("log", base=2)
            axes.grid(which="major", linewidth=0.3)
    grid[0, 0].set_ylabel("tokens per second")
    grid[1, 0].set_ylabel("fraction of GEMM peak")
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=3)
    figure.tight_layout(rect=(0, 0.04 + 0.03 * -(-len(labels) // 3), 1, 1))
    return figure


def _plot_run(
    record: dict[str, Any], model: dict[str, Any], run: dict[str, Any], rates: Axes, shares: Axes
) -> None:
    sizes = [batch["batch_size"] for batch in run["batches"]]
    tokens = [batch["tokens_per_s"] for batch in run["batches"]]
    style: dict[str, Any] = {
        "color": COLOURS[run["by"]],
        "linestyle": DASHES[run["dtype"]],
        "marker": ".",
    }
    rates.plot(sizes, tokens, label=f"{run['by']}, {run['dtype']}", **style)
    peak = record["peak_gflops"].get(run["dtype"])
    if peak is not None:  # measured by torch alone, where the engine does not compute in it
        shares.plot(sizes, [t * model["flops_per_token"] / 1e9 / peak for t in tokens], **style)
