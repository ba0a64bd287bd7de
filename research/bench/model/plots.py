"""`python -m research.bench.model.plots KIND RECORD.json`: plots a benchmark's record beside it.

A kind is what the record's name ends with.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")  # no display needed
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from research.bench.frame import Record
from research.bench.peaks.rates import bytes_moved, limit, runs_of

COLOURS = {
    "srm": "tab:blue",
    "PyTorch compiled": "tab:orange",
    "PyTorch eager": "tab:gray",
    "PyTorch captured": "tab:green",
    "PyTorch compiled, captured": "tab:red",
}
DASHES = {"float32": "--", "bfloat16": "-", "float8": ":"}


def draw_engine(record: Record) -> Figure:
    """Draw per model, by batch size: tokens a second, a step's time, the fraction of each peak."""
    models = record["models"]
    size = (4 * len(models), 8.5)
    figure, grid = plt.subplots(3, len(models), figsize=size, sharex="col", squeeze=False)
    for model, *panels in zip(models, *grid, strict=True):
        panels[0].set(title=model["name"], yscale="log")
        panels[1].set(yscale="log")
        panels[2].set(xlabel="sequences that decode at once", ylim=(0, 1))
        for run in model["runs"]:
            _plot_run(record, model, run, panels)
        _ruled(panels, base=2)
    for axes, label in zip(
        grid[:, 0],
        ("tokens per second", "time of a step (ms)", "of the GEMM peak; ×: of the memory's"),
        strict=True,
    ):
        axes.set_ylabel(label)
    return _explained(figure, 3)


def _plot_run(record: Record, model: Record, run: Record, panels: list[Axes]) -> None:
    rates, times, shares = panels
    sizes = [batch["batch_size"] for batch in run["batches"]]
    tokens = [batch["tokens_per_s"] for batch in run["batches"]]
    rows = [batch.get("rows", batch["batch_size"]) for batch in run["batches"]]
    seconds = [row / rate for row, rate in zip(rows, tokens, strict=True)]
    dashes = DASHES[run["dtype"]]
    style: Record = {"color": COLOURS[run["by"]], "linestyle": dashes, "marker": "."}
    rates.plot(sizes, tokens, label=f"{run['by']}, {run['dtype']}", **style)
    times.plot(sizes, [1e3 * second for second in seconds], **style)
    peak = record["peak_gflops"].get(run["dtype"])
    if peak is not None:  # measured by torch alone, where the engine does not compute in it
        shares.plot(sizes, [t * model["flops_per_token"] / 1e9 / peak for t in tokens], **style)
    copied = record.get("peak_gb_per_s")
    if copied and bytes_moved(model, run["dtype"], 1) is not None and run["by"] == "srm":
        moved = [bytes_moved(model, run["dtype"], row) or 0 for row in rows]
        gb_per_s = [size / s / 1e9 for size, s in zip(moved, seconds, strict=True)]
        of_peak = [rate / copied for rate in gb_per_s]
        shares.plot(sizes, of_peak, **style | {"marker": "x", "alpha": 0.5})


def draw_prefill(record: Record) -> Figure:
    """Draw per model and dtype the fraction of the GEMM peak by the length of a prompt."""
    models = record["models"]
    figure, grid = plt.subplots(1, len(models), figsize=(4 * len(models), 4), squeeze=False)
    for model, axes in zip(models, grid[0], strict=True):
        for run in model["runs"]:
            if run["dtype"] in record["peak_gflops"]:
                _plot_prompts(record["peak_gflops"][run["dtype"]], model, run, axes)
        axes.set(title=model["name"], xlabel="tokens of a prompt", ylim=(0, 1))
    _ruled(grid[0], base=2)
    grid[0, 0].set_ylabel("fraction of GEMM peak")
    return _explained(figure, 2)


def _plot_prompts(peak: float, model: Record, run: Record, axes: Axes) -> None:
    decoded = {
        entry["batch_size"]: entry["tokens_per_s"] * model["flops_per_token"] / 1e9 / peak
        for entry in run["decode"]
    }
    most: dict[int, int] = {}  # prompts in a step, by their length
    for entry in run["prefill"]:
        length = entry["prompt_tokens"]
        most[length] = max(entry["prompts"], most.get(length, 0))
    for name, colour, wanted in (
        ("one prompt", "tab:blue", dict.fromkeys(most, 1)),
        ("a full step", "tab:orange", most),
    ):
        entries = [
            record
            for record in run["prefill"]
            if record["prompts"] == wanted[record["prompt_tokens"]]
        ]
        lengths = [entry["prompt_tokens"] for entry in entries]
        style: Record = {"color": colour, "linestyle": DASHES[run["dtype"]]}
        flops = model["prefill_flops_per_token"] / 1e9 / peak
        rates = [entry["tokens_per_s"] * flops for entry in entries]
        axes.plot(lengths, rates, marker=".", label=f"{name}, {run['dtype']}", **style)
        rows = [decoded[entry["prompt_tokens"] * entry["prompts"]] for entry in entries]
        label = f"as many decoded, {run['dtype']}, {name}"
        axes.plot(lengths, rows, linewidth=0.7, alpha=0.6, label=label, **style)


def draw_host(record: Record) -> Figure:
    """Draw schedule and complete per row by running sequences, a line for each kind of case."""
    figure, axes = plt.subplots(figsize=(7, 4))
    lines: dict[str, list[tuple[int, float]]] = {}
    for case in record["cases"]:
        in_turns = "in turns" if case["rows"] < case["running"] else "in one step"
        length = case["length"]
        name = f"{in_turns}, " + (f"replaced after {length} tokens" if length else "going on")
        both = case["schedule"] + case["complete"]
        lines.setdefault(name, []).append((case["running"], both))
    for name, points in lines.items():
        axes.plot(*zip(*points, strict=True), marker=".", label=name)
    axes.set(yscale="log", xlabel="running sequences", ylabel="host time per decode row (ns)")
    _ruled([axes])
    axes.legend()
    return figure


def draw_kernels(record: Record) -> Figure:
    """Draw per model and dtype each op's fraction of its limit, a bar for each row count."""
    runs = runs_of(record)
    figure, grid = plt.subplots(1, len(runs), figsize=(4 * len(runs) + 1, 6), squeeze=False)
    for (model, run), axes in zip(runs, grid[0], strict=True):
        counts = sorted({entry["rows"] for entry in run["ops"]})
        names = list(dict.fromkeys(entry["op"] for entry in run["ops"]))
        height = 0.8 / len(counts)
        for place, rows in enumerate(counts):
            entries = [entry for entry in run["ops"] if entry["rows"] == rows]
            shares = [
                limit(record, run["dtype"], entry["flops"], entry["bytes"])[1] / entry["seconds"]
                for entry in entries
            ]
            at = [index + (place - (len(counts) - 1) / 2) * height for index in range(len(names))]
            axes.barh(at, shares, height=height, label=f"{rows:,} rows")
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.axvline(1, color="black", linewidth=0.5)
        axes.set(title=f"{model['name']}, {run['dtype']}", xlabel="fraction of the limit")
        axes.grid(axis="x", linewidth=0.3)
    return _explained(figure, 4)


def draw_peers(record: Record) -> Figure:
    """Draw the best tok/s over HTTP and offline, and tok/s by concurrent sequences."""
    best = {
        result["name"]: max(point["tokens_per_s"] for point in result["points"])
        for result in record["results"]
        if result["points"]
    }
    results = sorted((r for r in record["results"] if r["points"]), key=lambda r: best[r["name"]])
    ways = [how for how in ("http", "offline") if any(result["how"] == how for result in results)]
    size = (7 * max(1, len(ways)), 4 + 0.28 * len(results) / max(1, len(ways)))
    figure, grid = plt.subplots(2, max(1, len(ways)), figsize=size, squeeze=False)
    for column, how in enumerate(ways):
        bars, lines = grid[:, column]
        for peer in (result for result in results if result["how"] == how):
            name, is_ours = f"{peer['engine']}: {peer['model']}", peer["version"] == "this commit"
            colour = "tab:green" if peer["model"].startswith("srm") else "tab:gray"
            rate = best[peer["name"]]
            bar = bars.barh([name], [rate], color="tab:blue" if is_ours else colour)
            bars.bar_label(bar, [f" {rate:,.0f}"], fontsize=7)
            points = sorted((p["concurrency"], p["tokens_per_s"]) for p in peer["points"])
            width = 1.2 if is_ours else 0.7
            lines.plot(*zip(*points, strict=True), marker=".", linewidth=width, label=name)
        bars.set(title=f"best tok/s, {how}", xscale="log")
        bars.tick_params(axis="y", labelsize=7)
        bars.margins(x=0.15)
        lines.set(xlabel="sequences at once", ylabel="tok/s", yscale="log")
        _ruled([lines], base=2)
        lines.legend(fontsize=5)
    return figure


def _ruled(panels: Iterable[Axes], base: int = 10) -> None:
    for axes in panels:
        axes.set_xscale("log", base=base)
        axes.grid(which="major", linewidth=0.3)


def _explained(figure: Figure, columns: int) -> Figure:
    """Put the legend of the first panel below all of them."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=columns)
    lines = -(-len(labels) // columns)
    figure.tight_layout(rect=(0, (0.1 + 0.2 * lines) / figure.get_figheight(), 1, 1))
    return figure


KINDS: dict[str, tuple[Callable[[Record], Figure], str]] = {
    "engine": (draw_engine, "Tokens a second and step time by batch size"),
    "kernels": (draw_kernels, "Each op against the limit that binds it"),
    "host": (draw_host, "Host time per decode row by running sequences"),
    "prefill": (draw_prefill, "Fraction of the GEMM peak by length of the prompt"),
    "peers": (draw_peers, "Tokens a second of each engine"),
}
"""The function that draws each kind of record, and the picture's caption."""


def main(argv: list[str]) -> int:
    """Write the picture beside the record, and embed it in the record's Markdown report."""
    kind, record = argv[0], Path(argv[1])
    draw, caption = KINDS[kind]
    picture, report = record.with_suffix(".svg"), record.with_suffix(".md")
    with mpl.rc_context({"svg.hashsalt": "srm"}):  # the same picture for the same numbers
        figure: Any = draw(json.loads(record.read_text()))
        if not figure.legends:
            figure.tight_layout()
        figure.savefig(picture, metadata={"Date": None})
        plt.close(figure)
    line = f"\n![{caption}]({picture.name})\n"
    text = report.read_text()
    report.write_text(text if line in text else text + line)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
