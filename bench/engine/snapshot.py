"""`srm bench snapshot`: the time that a snapshot of many sequences takes, against the disk's rate.

Sequences of the real engine are read and written while it steps, and the same number of bytes is
written plainly in the same run. A second engine resumes from the last snapshot, and the record says
whether every token equals the one that the first engine, left alone, sampled.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any, Literal

import msgspec
import numpy as np

from bench.frame import Record, Settings, run, table
from engine.config import DEMO_MODEL, EngineConfig
from engine.device.runner import ModelRunner
from engine.errors import ConfigError, SnapshotError
from engine.messages import Output, Request, SamplingParams
from engine.process.durable import Detail, Durable
from engine.process.engine import Engine
from engine.process.snapshot import NAME
from engine.weights.checkpoint import load_checkpoint

PROMPT_TOKENS = 8


class SnapshotBenchConfig(Settings, frozen=True, forbid_unknown_fields=True):
    """Settings of `srm bench snapshot`."""

    model: Path = DEMO_MODEL
    """Checkpoint to measure; its shape matters, its weights hardly."""
    device: Literal["cpu", "gpu"] = "cpu"
    """Device that the model runs on: the processor, or the first GPU."""
    sequences: tuple[int, ...] = (5_000,)
    """Numbers of sequences that run when a snapshot is taken, each a request of its own."""
    max_tokens: int = 200
    """Tokens in each sequence; snapshots are taken when a quarter of them has been sampled."""
    repetitions: int = 3
    """Measurements of each figure; the median is reported, the record has all."""
    folder: str = ""
    """Folder that snapshots are written to; empty: the system's folder for temporary files."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_tokens < 8:
            raise ValueError(f"max_tokens must be at least 8, got {self.max_tokens}")


def main(argv: list[str]) -> int:
    """Measure, write a record, print its table."""
    return run(SnapshotBenchConfig, argv, "snapshot", measure, markdown)


def measure(config: SnapshotBenchConfig) -> Record:
    """Return the run of each number of sequences."""
    weights = load_checkpoint(config.model)
    with tempfile.TemporaryDirectory(dir=config.folder or None) as folder:
        served = EngineConfig(
            device=config.device, num_slots=max(config.sequences), snapshot_dir=folder
        )
        runner = ModelRunner(weights, served)

        runs = []
        for count in config.sequences:
            requests = _requests(count, weights.config.vocab_size, config.max_tokens)
            first, second = (
                Engine(weights.config, runner, served, weights.fingerprint) for _ in range(2)
            )
            runs.append(_run(config, served, first, second, requests))
        runner.close()
    return {"model": msgspec.to_builtins(weights.config), "runs": runs}


def _requests(count: int, vocab_size: int, max_tokens: int) -> list[Request]:
    prompts = np.random.default_rng(0).integers(0, vocab_size, (count, PROMPT_TOKENS), np.int32)
    return [
        Request(
            id=str(number),
            prompt_token_ids=prompt.tobytes(),
            params=SamplingParams(max_tokens=max_tokens, seed=number, ignore_eos=True),
            durable=True,
        )
        for number, prompt in enumerate(prompts)
    ]


def _run(
    config: SnapshotBenchConfig,
    served: EngineConfig,
    first: Engine,
    second: Engine,
    requests: list[Request],
) -> dict[str, Any]:
    durable = Durable(first, served)
    for request in requests:
        first.add(request)
    outputs: list[Output] = []
    while first.num_steps < config.max_tokens // 4 or first.scheduler.num_waiting:
        outputs += first.step_overlapped()
    folder = Path(served.snapshot_dir)
    figures = []
    for _ in range(config.repetitions):
        detail = _snapshot(first, durable, outputs)
        if detail["sequences"] != len(requests):
            raise ConfigError(
                f"max_tokens = {config.max_tokens} is too small: sequences ended before "
                f"{config.repetitions} snapshots were taken"
            )
        del detail["path"]  # of a folder that is gone by then
        figures.append(detail | {"disk_s": _plain_write(folder, int(detail["bytes"]))})
    left_alone = outputs + _finish(first)
    restoring = Durable(second, served)
    started = time.perf_counter()
    for request in requests:
        second.add(request)
        restoring.accepted(request.id)
    added_s = time.perf_counter() - started
    again = second.step()
    restore_s = time.perf_counter() - started
    steps = second.num_steps
    again += _finish(second)
    (folder / NAME).unlink()
    return {
        "sequences": len(requests),
        "snapshots": figures,
        "read_back_s": added_s,
        "restore_s": restore_s,
        "steps_to_go": second.num_steps - steps,
        "same_tokens": _tokens(left_alone) == _tokens(again),
    }


def _snapshot(engine: Engine, durable: Durable, outputs: list[Output]) -> Detail:
    """Take a snapshot as the engine process does, stepping meanwhile."""
    found: list[Detail | SnapshotError] = []
    durable.ask(found.append)
    steps, started = engine.num_steps, time.perf_counter()
    while not found:
        durable.tick(has_requests=True)
        if durable.wants_part:
            outputs += engine.settle()
            durable.advance()
        if not found:
            outputs += engine.step_overlapped()
    if isinstance(found[0], SnapshotError):
        raise found[0]
    step_s = (time.perf_counter() - started) / max(1, engine.num_steps - steps)
    return found[0] | {"steps_meanwhile": engine.num_steps - steps, "step_s": step_s}


def _plain_write(folder: Path, size: int) -> float:
    """Return the seconds to write so many bytes sequentially and sync them."""
    block = np.random.default_rng(0).bytes(2**24)
    path = folder / "plain"
    started = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for begin in range(0, size, len(block)):
            file.write(block[: size - begin])
        os.fsync(file.fileno())
    seconds = time.perf_counter() - started
    path.unlink()
    return seconds


def _finish(engine: Engine) -> list[Output]:
    outputs = []
    while engine.has_work:
        outputs += engine.step_overlapped()
    return outputs


def _tokens(outputs: list[Output]) -> dict[str, bytes]:
    return {output.id: output.token_ids for output in outputs}


def markdown(record: Record) -> list[str]:
    """Render the record as a table."""
    rows = []
    for each in record["runs"]:
        size, read_s, write_s, disk_s = (
            median(one[name] for one in each["snapshots"])
            for name in ("bytes", "read_s", "write_s", "disk_s")
        )
        rows.append(
            f"{each['sequences']:,} | {size / 1e6:.1f} | {1e3 * read_s:.1f} | {write_s:.3f} "
            f"| {size / write_s / 1e9:.2f} | {size / disk_s / 1e9:.2f} | {disk_s / write_s:.0%} "
            f"| {each['restore_s']:.2f} | {'yes' if each['same_tokens'] else 'NO'}"
        )
    return [
        "Sequences are read from the running engine and written while it steps; *pause* is the "
        "reading, which it waits for. *Disk* writes as many bytes in a row and syncs them, in the "
        "same run. *Restore* is from the first request sent again to the first step of all. "
        "Figures are medians; raw numbers are in the JSON file.",
        "",
        *table(
            "sequences | MB | pause ms | write s | GB/s | disk GB/s | share of the disk's "
            "| restore s | same tokens",
            rows,
        ),
    ]
