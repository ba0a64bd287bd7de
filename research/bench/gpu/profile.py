"""`python -m research.bench.gpu.profile TASK`: time on the GPU of every kernel of a step, by ncu.

Runs `research.bench.gpu.one_step` below NVIDIA's profiler, which serialises kernels, and reads its
table, which stays beside the lines. MAX's kernels have names of digits; each is told by its place.
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

from research.bench.gpu.task import Lines, Task, read_task

METRIC = "gpu__time_duration.sum"
NS = {"ns": 1.0, "nsecond": 1.0, "us": 1e3, "usecond": 1e3, "ms": 1e6, "msecond": 1e6}
BEGIN, END = ("expand", "embed"), ("head", "edit", "sample", "score")
LAYERS = {
    5: ("up", "down", "proj_in", "mix", "proj_out"),
    6: ("norm", "up", "down", "proj_in", "mix", "proj_out"),  # in float8
}
"""Kernels of a step in their order, those of a layer by how many there are."""


def main(argv: list[str]) -> int:
    task = read_task(argv)
    lines = Lines.from_task(task)
    step: dict[str, Any] = {}

    def profile() -> dict[str, Any]:
        step.update(_profile(task, argv[0]))
        return step

    lines.attempt("kernels", profile)
    for rows in task.op_rows if step else ():
        count = partial(_count, task, argv[0], rows, step["launches"])
        lines.attempt(f"counters {rows}", count)
    return 0


def _profile(task: Task, given: str) -> dict[str, Any]:
    report = _file_of(task, "kernels.csv")
    _run_steps(
        *("--csv", "--page", "raw", "--metrics", METRIC, "--log-file", str(report)),
        settings=json.loads(given) | {"part": f"{task.part} run"},
    )
    kernels = last_step(read_kernels(report.read_text()), task.model.num_layers)
    return {"d_model": task.d_model, "rows": task.rows[0]} | kernels


def _count(task: Task, given: str, rows: int, launches: int) -> dict[str, Any]:
    """Have every counter of one launch of each kernel of a step written to files, and what its
    warps wait for at each instruction."""
    report = _file_of(task, "counters.ncu-rep")
    skipped, names = each_once(launches, task.model.num_layers)
    _run_steps(
        *("--set", "full", "--import-source", "no", "-f", "-o", str(report)),
        *("--launch-skip", str(skipped), "--launch-count", str(len(names))),
        settings=json.loads(given)
        | {"part": f"{task.part} {rows} rows", "rows": [rows], "repetitions": 3},
    )
    for page in ("raw", "source"):
        shown = ["ncu", "--import", str(report), "--csv", "--page", page]
        with _file_of(task, f"{page}.csv").open("wb") as file:
            subprocess.run(shown, check=True, stdout=file)
    facts = {"d_model": task.d_model, "rows": rows, "bytes": report.stat().st_size}
    return facts | {"kernels_in_order": names}


def _run_steps(*options: str, settings: dict[str, Any]) -> None:
    """Run steps below ncu; their lines are another part's, so that both attempts count."""
    profiler = ["ncu", "--clock-control", "none", "--target-processes", "all", *options]
    steps = [sys.executable, "-m", "research.bench.gpu.one_step", json.dumps(settings)]
    subprocess.run([*profiler, *steps], check=True)


def _file_of(task: Task, name: str) -> Path:
    return Path(task.lines).with_name(f"{task.part.replace(' ', '-')}-{name}")


def read_kernels(report: str) -> list[tuple[str, float]]:
    """Return name and nanoseconds of each kernel in ncu's table, in order.

    Raises ValueError for a report without a table, or of an unknown unit.
    """
    lines = report.splitlines()
    begin = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if begin is None:
        raise ValueError(f"ncu gave no table, but: {report[:300]!r}")
    units, *rows = csv.DictReader(lines[begin:])
    if units[METRIC] not in NS:
        raise ValueError(f"{METRIC} is in {units[METRIC]!r}, not in one of {', '.join(NS)}")
    to_ns = NS[units[METRIC]]
    return [(row["Kernel Name"], float(row[METRIC].replace(",", "")) * to_ns) for row in rows]


def last_step(kernels: list[tuple[str, float]], num_layers: int) -> dict[str, Any]:
    """Return what the kernels of the last step take, in all layers, the longest first.

    A step is what repeats: the last launches of the same names as those before them.
    """
    names = [name for name, _ in kernels]
    periods = range(1, len(names) // 2 + 1)
    period = next((n for n in periods if names[-n:] == names[-2 * n : -n]), 0)
    if not period:
        raise ValueError(f"no step repeats among {len(names)} launches: {names[-80:]}")
    entries: dict[str, list[float]] = defaultdict(list)
    for label, (_, ns) in zip(_labels(period, num_layers), kernels[-period:], strict=True):
        entries[label].append(ns)
    ordered = sorted(entries.items(), key=lambda entry: -sum(entry[1]))
    return {
        "kernels": [{"name": name, "calls": len(ns), "ns": sum(ns)} for name, ns in ordered],
        "launches": period,
        "ns": sum(ns for _, ns in kernels[-period:]),
    }


def each_once(launches: int, num_layers: int) -> tuple[int, list[str]]:
    """Return how many launches to skip, and the names of those that then have each kernel of a step
    once: the second step's end, and the third's begin with its first layer."""
    names = _labels(launches, num_layers)
    of_layer = (launches - len(BEGIN) - len(END)) // num_layers
    return 2 * launches - len(END), names[-len(END) :] + names[: len(BEGIN) + of_layer]


def _labels(launches: int, num_layers: int) -> list[str]:
    """Return the names of a step's kernels, or their numbers where it has others than ours."""
    of_layers = launches - len(BEGIN) - len(END)
    layer = LAYERS.get(of_layers // num_layers) if of_layers % num_layers == 0 else None
    if layer is None:
        return [f"launch {number}" for number in range(launches)]
    return [*BEGIN, *layer * num_layers, *END]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
