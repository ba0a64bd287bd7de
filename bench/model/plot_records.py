"""`python -m bench.model.plot_records KIND RECORD.json`: plots a benchmark's record beside it.

A kind is what the record's name ends with.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib as mpl

mpl.use("svg")  # no display needed
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from bench.model.plot_engine import DASHES, draw_engine

Record = dict[str, Any]


def draw_prefill(record: Record) -> Figure:
    """Draw per model and dtype the fraction of the GEMM peak by the length of a prompt."""
    models = record["models"]
    figure, grid = plt.subplots(1, len(models), figsize=(4 * len(models), 4), squeeze=False)
    for model, axes in zip(models, grid[0], strict=True):
        for run in model["runs"]:
            _draw_prompts(record, model, run, axes)
        axes.set(title=model["name"], xlabel="tokens of a prompt", ylim=(0, 1))
        axes.set_xscale("log", base=2)
        axes.grid(which="major", linewidth=0.3)
    grid[0, 0].set_ylabel("fraction of GEMM peak")
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="lower center", ncols=2)
    figure.tight_layout(rect=(0, 0.22, 1, 1))
    return figure


def _draw_prompts(record: Record, model: Record, run: Record, axes: Any) -> None:
    peak = record["peak_gflops"].get(run["dtype"])
    if peak is None:  # measured by torch alone, where the engine does not compute in it
        return
    decoded = {
        entry["batch_size"]: entry["tokens_per_s"] * model["flops_per_token"] / 1e9 / peak
        for entry in run["decode"]
    }
    prompts: dict[int, int] = {}  # most in a step, by their length
    for entry in run["prefill"]:
        length = entry["prompt_tokens"]
        prompts[length] = max(entry["prompts"], prompts.get(length, 0))
    for name, colour, wanted in (
        ("one prompt", "tab:blue", dict.fromkeys(prompts, 1)),
        ("a full step", "tab:orange", prompts),
    ):
        entries = [one for one in run["prefill"] if one["prompts"] == wanted[one["prompt_tokens"]]]
        lengths = [entry["prompt_tokens"] for entry in entries]
        style: Record = {"color": colour, "linestyle": DASHES[run["dtype"]]}
        rates = [
            entry["tokens_per_s"] * model["prefill_flops_per_token"] / 1e9 / peak
            for entry in entries
        ]
        axes.plot(lengths, rates, marker=".", label=f"{name}, {run['dtype']}", **style)
        rows = [decoded[entry["prompt_tokens"] * entry["prompts"]] for entry in entries]
        label = f"as many decoded, {run['dtype']}"
        axes.plot(lengths, rows, linewidth=0.7, alpha=0.6, label=f"{label}, {name}", **style)


def draw_prefix_reuse(record: Record) -> Figure:
    """Draw the seconds of all prompts and the prompt tokens fed, by what the cache held."""
    names = {"off": "nothing kept", "empty": "nothing at first", "filled": "all kept"}
    figure, (times, fed) = plt.subplots(1, 2, figsize=(9, 3.5))
    for axes, figure_name, label, digits in (
        (times, "seconds", "seconds", 1),
        (fed, "prefilled_tokens", "prompt tokens fed", 0),
    ):
        values = [median(run[figure_name] for run in record["runs"][name]) for name in names]
        bars = axes.bar(list(names.values()), values, color=["tab:gray", "tab:blue", "tab:green"])
        axes.bar_label(bars, [f"{value:,.{digits}f}" for value in values])
        axes.set_ylabel(label)
        axes.margins(y=0.12)
    figure.tight_layout()
    return figure


def draw_simulation(record: Record) -> Figure:
    """Draw tokens a second of the simulated device alone, and with the measured host."""
    cases = record["cases"]
    figure, axes = plt.subplots(figsize=(8, 4))
    labels = [
        f"d {case['width']:,}, {case['step_rows']:,} rows\n{case['efficiency']:.0%} of the rates"
        for case in cases
    ]
    device = [case["device_tokens_per_s"] / 1e6 for case in cases]
    reached = [case["tokens_per_s"] / 1e6 for case in cases]
    axes.barh(labels, device, color="tab:gray", alpha=0.4, label="the device alone")
    bars = axes.barh(labels, reached, height=0.5, color="tab:blue", label="with the host")
    shares = [f"{part / whole:.0%}" for part, whole in zip(reached, device, strict=True)]
    axes.bar_label(bars, shares, label_type="center", color="white")
    axes.invert_yaxis()
    axes.set_xlabel("million tokens per second")
    axes.legend()
    figure.tight_layout()
    return figure


def draw_samples(record: Record) -> Figure:
    """Draw pass@k of each problem, and tokens a second."""
    figure, (chances, rates) = plt.subplots(1, 2, figsize=(9, 4), width_ratios=(2, 1))
    names = [f"{number}. {run['kind']}" for number, run in enumerate(record["runs"], 1)]
    for name, run in zip(names, record["runs"], strict=True):
        ks = [int(k) for k in run["pass_at"]]
        chances.plot(ks, list(run["pass_at"].values()), marker=".", label=name)
    chances.set(xscale="log", xlabel="samples k", ylabel="pass@k", ylim=(0, 1.02))
    chances.grid(which="major", linewidth=0.3)
    chances.legend(loc="lower right")
    rates.bar(names, [run["tokens_per_s"] for run in record["runs"]], color="tab:blue")
    rates.set_ylabel("tokens per second")
    rates.tick_params(axis="x", labelrotation=30)
    figure.tight_layout()
    return figure


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
    axes.set(xscale="log", yscale="log")
    axes.set(xlabel="running sequences", ylabel="host time per decode row (ns)")
    axes.grid(which="both", linewidth=0.3)
    axes.legend()
    figure.tight_layout()
    return figure


def draw_kernels(record: Record) -> Figure:
    """Draw per model and dtype each op's fraction of its limit, a bar for each row count."""
    runs = [(model, run) for model in record["models"] for run in model["runs"]]
    figure, grid = plt.subplots(1, len(runs), figsize=(4 * len(runs) + 1, 6), squeeze=False)
    for (model, run), axes in zip(runs, grid[0], strict=True):
        counts = sorted({entry["rows"] for entry in run["ops"]})
        names = list(dict.fromkeys(entry["op"] for entry in run["ops"]))
        height = 0.8 / len(counts)
        for place, rows in enumerate(counts):
            entries = [entry for entry in run["ops"] if entry["rows"] == rows]
            shares = [_share_of_limit(record, run["dtype"], entry) for entry in entries]
            at = [index + (place - (len(counts) - 1) / 2) * height for index in range(len(names))]
            axes.barh(at, shares, height=height, label=f"{rows:,} rows")
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.axvline(1, color="black", linewidth=0.5)
        axes.set(title=f"{model['name']}, {run['dtype']}", xlabel="fraction of the limit")
        axes.grid(axis="x", linewidth=0.3)
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="lower center", ncols=4)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    return figure


def _share_of_limit(record: Record, dtype: str, entry: Record) -> float:
    by_flops = entry["flops"] / record["peak_gflops"][dtype]
    by_bytes = entry["bytes"] / record["peak_gb_per_s"]
    return float(max(by_flops, by_bytes) / 1e9 / entry["seconds"])


KINDS: dict[str, tuple[Callable[[Record], Figure], str]] = {
    "engine": (draw_engine, "Tokens a second and step time by batch size"),
    "kernels": (draw_kernels, "Each op against the limit that binds it"),
    "host": (draw_host, "Host time per decode row by running sequences"),
    "prefill": (draw_prefill, "Fraction of the GEMM peak by length of the prompt"),
    "prefix-reuse": (draw_prefix_reuse, "Time and tokens fed by what was kept"),
    "simulate": (draw_simulation, "Tokens a second of the device and with the host"),
    "samples": (draw_samples, "pass@k and tokens a second"),
}
"""The function that draws each kind of record, and the picture's caption."""


def main(argv: list[str]) -> int:
    """Write the picture beside the record, and embed it in the record's Markdown report."""
    kind, record = argv[0], Path(argv[1])
    draw, caption = KINDS[kind]
    picture, report = record.with_suffix(".svg"), record.with_suffix(".md")
    with mpl.rc_context({"svg.hashsalt": "srm"}):  # the same picture for the same numbers
        figure = draw(json.loads(record.read_text()))
        figure.savefig(picture, metadata={"Date": None})
        plt.close(figure)
    line = f"\n![{caption}]({picture.name})\n"
    text = report.read_text()
    report.write_text(text if line in text else text + line)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
