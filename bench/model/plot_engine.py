"""Draws a record of `srm bench engine`."""

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
    """Draw per model, by batch size: tokens a second, a step's time, the fraction of each peak."""
    models = record["models"]
    size = (4 * len(models), 8.5)
    figure, grid = plt.subplots(3, len(models), figsize=size, sharex="col", squeeze=False)
    for model, *panels in zip(models, *grid, strict=True):
        rates, times, shares = panels
        rates.set(title=model["name"], yscale="log")
        times.set(yscale="log")
        shares.set(xlabel="sequences that decode at once", ylim=(0, 1))
        for run in model["runs"]:
            _plot_run(record, model, run, panels)
        for axes in panels:
            axes.set_xscale("log", base=2)
            axes.grid(which="major", linewidth=0.3)
    grid[0, 0].set_ylabel("tokens per second")
    grid[1, 0].set_ylabel("time of a step (ms)")
    grid[2, 0].set_ylabel("of the GEMM peak; ×: of the memory's")
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=3)
    figure.tight_layout(rect=(0, 0.03 + 0.02 * -(-len(labels) // 3), 1, 1))
    return figure


def _plot_run(
    record: dict[str, Any], model: dict[str, Any], run: dict[str, Any], panels: list[Axes]
) -> None:
    rates, times, shares = panels
    sizes = [batch["batch_size"] for batch in run["batches"]]
    tokens = [batch["tokens_per_s"] for batch in run["batches"]]
    rows = [batch.get("rows", batch["batch_size"]) for batch in run["batches"]]
    seconds = [row / rate for row, rate in zip(rows, tokens, strict=True)]
    style: dict[str, Any] = {
        "color": COLOURS[run["by"]],
        "linestyle": DASHES[run["dtype"]],
        "marker": ".",
    }
    rates.plot(sizes, tokens, label=f"{run['by']}, {run['dtype']}", **style)
    times.plot(sizes, [1e3 * one for one in seconds], **style)
    peak = record["peak_gflops"].get(run["dtype"])
    if peak is not None:  # measured by torch alone, where the engine does not compute in it
        shares.plot(sizes, [t * model["flops_per_token"] / 1e9 / peak for t in tokens], **style)
    counted = model.get("bytes", {}).get(run["dtype"])
    if counted is not None and run["by"] == "srm":  # earlier records counted none
        moved = [counted["once"] + row * counted["row"] for row in rows]
        limit = record["peak_gb_per_s"] * 1e9
        moving = [one / s / limit for one, s in zip(moved, seconds, strict=True)]
        shares.plot(sizes, moving, **style | {"marker": "x", "alpha": 0.5})
