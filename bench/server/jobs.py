"""`srm bench jobs`: batches of more and more short lines, and the resources of each process.

Starts `srm serve` anew for each number of lines, with a model that costs next to nothing, and runs
one batch through HTTP: this measures all that lies around the model, and whether its cost per line
stays the same when the file grows.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Literal

from bench.frame import Record, Settings, run, table
from bench.host.processes import seconds_and_peaks
from bench.host.serving import serving
from bench.host.tiny import write_tiny_model
from engine.errors import ConfigError
from loadtest.commands.offline import run_batch
from loadtest.scenario import Scenario
from loadtest.workload.batch_file import BatchClient

_MODULES = {"max": "engine", "instant": "bench.host.instant"}


class JobsBenchConfig(Settings, frozen=True, forbid_unknown_fields=True):
    """Settings of `srm bench jobs`."""

    lines: tuple[int, ...] = (10_000, 100_000, 1_000_000)
    """Lines of each batch."""
    max_tokens: int = 8
    """Tokens of each line's completion."""
    model: str = ""
    """Folder of the model; empty: a tiny one with random weights."""
    engine: Literal["max", "instant"] = "max"
    """What computes: the model, or nothing, which answers with made-up tokens at once."""
    num_slots: int = 4096
    """Sequences that run together."""


def main(argv: list[str]) -> int:
    """Measure, write a record, print its table."""
    return run(JobsBenchConfig, argv, "jobs", measure, markdown)


def measure(config: JobsBenchConfig) -> Record:
    """Return the batch of each number of lines."""
    with tempfile.TemporaryDirectory(prefix="srm-bench-") as folder:
        model = Path(config.model or Path(folder) / "tiny")
        if not config.model:
            write_tiny_model(model)
        found = [_measure_batch(config, model, Path(folder), count) for count in config.lines]
    return {"cases": found}


def _measure_batch(
    config: JobsBenchConfig, model: Path, folder: Path, count: int
) -> dict[str, Any]:
    flags = (f"--model={model}", f"--data-dir={folder / str(count)}")
    slots = (f"--num-slots={config.num_slots}", f"--max-step-rows={config.num_slots}")
    module = _MODULES[config.engine]
    with (
        serving(*flags, *slots, engine_module=module) as server,
        BatchClient(server.url) as client,
    ):
        tokens = str(config.max_tokens)
        scenario = Scenario(url=server.url, prompt_tokens="6", output_tokens=tokens)
        batch = run_batch(scenario, count, client, "bench")
        processes = seconds_and_peaks(server.pid)
    if batch.failed:
        raise ConfigError(f"{batch.failed} of {count} lines went wrong: {batch.first_error}")
    return {
        "lines": count,
        "output_bytes": batch.num_bytes,
        "upload_s": batch.upload_s,
        "run_s": batch.run_s,
        "download_s": batch.download_s,
        "processes": {
            name: {"processor_s": seconds, "peak_bytes": peak}
            for name, (seconds, peak) in sorted(processes.items())
        },
    }


def markdown(record: Record) -> list[str]:
    """Render the record as a table."""
    settings, cases = record["settings"], record["cases"]
    names = sorted({name for case in cases for name in case["processes"]})
    rows = []
    for case in cases:
        used = [case["processes"][name] for name in names]
        micros = 1e6 / case["lines"]
        each = [
            f"{one['peak_bytes'] / 2**20:,.0f} MiB, {micros * one['processor_s']:,.0f} µs"
            for one in used
        ]
        rows.append(
            f"{case['lines']:,} | {case['upload_s']:.1f} s | {case['run_s']:.1f} s "
            f"| {case['lines'] / case['run_s']:,.0f} | {case['download_s']:.1f} s "
            f"| {' | '.join(each)}"
        )
    heads = ["lines", "upload", "run", "lines/s", "download", *(f"`{name}`" for name in names)]
    return [
        f"One batch, {settings['max_tokens']} tokens a line, {settings['num_slots']:,} slots; "
        f"engine: {settings['engine']}. Most memory of each process, and its processor time a "
        "line.",
        "",
        *table(" | ".join(heads), rows),
    ]
