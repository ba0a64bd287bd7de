"""`python -m bench.gpu.profile TASK`: time on the GPU of every kernel of a step, by ncu.

Runs `bench.gpu.one_step` below NVIDIA's profiler, which serialises kernels, and reads its table.
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from bench.gpu.task import Lines, Task, read_task

METRIC = "gpu__time_duration.sum"
NS = {"ns": 1.0, "nsecond": 1.0, "us": 1e3, "usecond": 1e3, "ms": 1e6, "msecond": 1e6}
STEP = "embed"
"""Part of the name of a step's first kernel."""


def main(argv: list[str]) -> int:
    task = read_task(argv)
    Lines.of(task).attempt("kernels", lambda: _profile(task, argv[0]))
    return 0


def _profile(task: Task, given: str) -> dict[str, Any]:
    # Its lines are another part's, so that both attempts count.
    settings = json.dumps(json.loads(given) | {"part": f"{task.part} run"})
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "kernels.csv"
        profiler = ["ncu", "--csv", "--page", "raw", "--metrics", METRIC, "--log-file", str(report)]
        profiler += ["--clock-control", "none", "--target-processes", "all"]
        command = [*profiler, sys.executable, "-m", "bench.gpu.one_step", settings]
        subprocess.run(command, check=True)
        kernels = read_kernels(report.read_text())
    return {"d_model": task.d_model, "rows": task.rows[0]} | last_step(kernels)


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


def last_step(kernels: list[tuple[str, float]]) -> dict[str, Any]:
    """Return what the kernels of the last step take, by name, those that take longest first."""
    begins = [i for i, (name, _) in enumerate(kernels) if STEP in name]
    if not begins:
        raise ValueError(f"no kernel is named {STEP!r}, which begins a step")
    step = kernels[begins[-1] :]
    found: dict[str, list[float]] = defaultdict(list)
    for name, ns in step:
        found[name].append(ns)
    ordered = sorted(found.items(), key=lambda one: -sum(one[1]))
    return {
        "kernels": [{"name": name, "calls": len(ns), "ns": sum(ns)} for name, ns in ordered],
        "launches": len(step),
        "ns": sum(ns for _, ns in step),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
