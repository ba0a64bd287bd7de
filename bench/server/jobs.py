"""`srm bench jobs`: batches of more and more short lines, and the resources of each process.

Starts `srm serve` anew for each number of lines, with a model that costs next to nothing, and runs
one batch through HTTP: this measures all that lies around the model, and whether its cost per line
stays the same when the file grows. Records go to docs/benchmarks/.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

import msgspec

from bench.server.batches import BatchClient, write_lines
from bench.server.served import served
from engine.errors import ConfigError
from engine.records import RECORDS, ROOT, new_record, settings_of, write_record
from engine.settings import load

_MODULES = {"max": "engine", "instant": "bench.host.instant"}
MIB = 2**20


class JobsBenchConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
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
    output: Path = RECORDS
    """Folder that the record is written to."""

    def __post_init__(self) -> None:
        if not self.lines or min(self.lines) < 1:
            raise ValueError(f"lines must be one or more numbers of at least 1, got {self.lines}")
        for name in ("max_tokens", "num_slots"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


def main(argv: list[str]) -> int:
    """Measure, write a record, print its table."""
    config = load(JobsBenchConfig, argv, prog="srm bench jobs")
    with tempfile.TemporaryDirectory(prefix="srm-bench-") as folder:
        model = config.model or _tiny_model(Path(folder))
        cases = [_measure(config, model, Path(folder), count) for count in config.lines]
    record = new_record(" ".join(["srm bench jobs", *argv])) | {
        "settings": settings_of(config),
        "cases": cases,
    }
    write_record(record, "jobs", markdown(record), config.output)
    return 0


def _tiny_model(folder: Path) -> str:
    path = str(folder / "tiny")
    subprocess.run([sys.executable, "-m", "bench.host.tiny", path], cwd=ROOT, check=True)
    return path


def _measure(config: JobsBenchConfig, model: str, folder: Path, count: int) -> dict[str, Any]:
    source = folder / f"{count}.jsonl"
    write_lines(source, count, config.max_tokens)
    flags = (
        f"--model={model}",
        f"--data-dir={folder / str(count)}",
        f"--num-slots={config.num_slots}",
        f"--max-step-rows={config.num_slots}",
    )
    module = _MODULES[config.engine]
    with served(module, *flags) as server, BatchClient(server.url) as client:
        begun = time.perf_counter()
        id = client.start(source)
        uploaded = time.perf_counter()
        batch = client.wait(id)
        done = time.perf_counter()
        if batch["status"] != "completed" or batch["request_counts"]["completed"] != count:
            raise ConfigError(f"the batch of {count} lines went wrong: {batch}")
        lines, size = client.download(batch["output_file_id"])
        read = time.perf_counter()
        processes = server.seconds_and_peaks()
    if lines != count:
        raise ConfigError(f"the output of {count} lines has {lines}")
    return {
        "lines": count,
        "input_bytes": source.stat().st_size,
        "output_bytes": size,
        "upload_s": uploaded - begun,
        "run_s": done - uploaded,
        "download_s": read - done,
        "validated_s": batch["in_progress_at"] - batch["created_at"],
        "processes": {
            name: {"processor_s": seconds, "peak_bytes": peak}
            for name, (seconds, peak) in sorted(processes.items())
        },
    }


def markdown(record: dict[str, Any]) -> str:
    """Render the record as a table."""
    settings, cases = record["settings"], record["cases"]
    names = sorted({name for case in cases for name in case["processes"]})
    lines = [
        f"One batch, {settings['max_tokens']} tokens a line, {settings['num_slots']:,} slots; "
        f"engine: {settings['engine']}. Most memory of each process, and its processor time a "
        "line.",
        "",
        "| lines | upload | run | lines/s | download |" + "".join(f" `{name}` |" for name in names),
        "|---|---|---|---|---|" + "---|" * len(names),
    ]
    for case in cases:
        each = [_process(case, name) for name in names]
        lines.append(
            f"| {case['lines']:,} | {case['upload_s']:.1f} s | {case['run_s']:.1f} s "
            f"| {case['lines'] / case['run_s']:,.0f} | {case['download_s']:.1f} s "
            f"| {' | '.join(each)} |"
        )
    return "\n".join(lines) + "\n"


def _process(case: dict[str, Any], name: str) -> str:
    found = case["processes"][name]
    each = 1e6 * found["processor_s"] / case["lines"]
    return f"{found['peak_bytes'] / MIB:,.0f} MiB, {each:,.0f} µs"
