"""`srm bench profile`: time on the GPU of every kernel of a step, by ncu.

Runs `research.bench.gpu.one_step` below NVIDIA's profiler, which serialises kernels, and reads its
table, which stays beside the record. MAX's kernels have names of digits; each is told by its place.
With `counted_rows`, files beside it have every counter of one launch of each kernel, and what its
warps wait for at each instruction.
"""

from __future__ import annotations

import csv
import subprocess
import sys
from collections import defaultdict
from typing import Any

from research.bench.engine.models import StepsConfig
from research.bench.frame import Record, note, run, table
from srm.errors import ConfigError

METRIC = "gpu__time_duration.sum"
NS = {"ns": 1.0, "nsecond": 1.0, "us": 1e3, "usecond": 1e3, "ms": 1e6, "msecond": 1e6}
BEGIN, END = ("expand", "embed"), ("head", "edit", "sample", "score")
LAYERS = {
    5: ("up", "down", "proj_in", "mix", "proj_out"),
    6: ("norm", "up", "down", "proj_in", "mix", "proj_out"),  # in float8
}
"""Kernels of a step in their order, those of a layer by how many there are."""
NUM_LAYERS = 8


class ProfileConfig(StepsConfig, frozen=True, forbid_unknown_fields=True):
    """Settings of `srm bench profile`."""

    counted_rows: tuple[int, ...] = ()
    """Rows of steps whose kernels have all their counters read."""


def main(argv: list[str]) -> int:
    """Profile, write a record, print its table."""
    return run(ProfileConfig, argv, "profile", measure, markdown)


def measure(config: ProfileConfig) -> Record:
    """Return the kernels of a step of each width; counters stay in files."""
    config.output.mkdir(parents=True, exist_ok=True)
    cases = []
    for width in config.random_widths:
        report = config.output / f"kernels-{width}.csv"
        options = ("--csv", "--page", "raw", "--metrics", METRIC, "--log-file", str(report))
        _run_steps(config, width, config.rows[0], *options)
        step = last_step(read_kernels(report.read_text()), NUM_LAYERS)
        cases.append(note({"d_model": width, "rows": config.rows[0]} | step))
        for rows in config.counted_rows:
            _count(config, width, rows, step["launches"])
    return {"cases": cases}


def _count(config: ProfileConfig, width: int, rows: int, launches: int) -> None:
    report = config.output / f"counters-{width}-{rows}.ncu-rep"
    skipped, names = each_once(launches, NUM_LAYERS)
    which = ("--launch-skip", str(skipped), "--launch-count", str(len(names)))
    full = ("--set", "full", "--import-source", "no", "-f", "-o", str(report))
    _run_steps(config, width, rows, *full, *which)
    for page in ("raw", "source"):
        shown = ["ncu", "--import", str(report), "--csv", "--page", page]
        with report.with_suffix(f".{page}.csv").open("wb") as file:
            subprocess.run(shown, check=True, stdout=file)
    note({"d_model": width, "rows": rows, "kernels_in_order": names})


def _run_steps(config: ProfileConfig, width: int, rows: int, *options: str) -> None:
    flags: Record = {"random-widths": width, "rows": rows, "dtypes": config.dtypes[0]}
    flags |= {"repetitions": 3, "cache-dir": config.cache_dir, "product": config.product}
    flags |= {"variants": ",".join(config.variants)}
    profiler = ["ncu", "--clock-control", "none", "--target-processes", "all", *options]
    steps = [sys.executable, "-m", "research.bench.gpu.one_step"]
    given = [f"--{name}={value}" for name, value in flags.items()]
    try:
        subprocess.run([*profiler, *steps, *given], check=True)
    except OSError as error:
        raise ConfigError(f"ncu, NVIDIA's profiler, cannot be run: {error.strerror}") from error


def markdown(record: Record) -> list[str]:
    """Render the record as a table."""
    return table(
        "d | rows | kernel | calls | µs | of the step",
        (
            f"{case['d_model']} | {case['rows']:,} | `{kernel['name'][:80]}` | {kernel['calls']} "
            f"| {kernel['ns'] / 1e3:,.1f} | {kernel['ns'] / case['ns']:.1%}"
            for case in record["cases"]
            for kernel in case["kernels"]
        ),
    )


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
