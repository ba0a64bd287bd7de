"""`srm bench host`: host time of a step per decode row, from 1,000 to 1,000,000 sequences.

The scheduler runs as it does in an engine, each step scheduled before the previous one is
completed, on results that are available at once: what remains is schedule and complete. It is
measured with sequences that only go on, and with short ones that end and are constantly replaced;
each with all running sequences in one step, and in turns. The same run measures a model's step on
this machine, to which the host's time is compared, and the memory's bandwidth.
"""

from __future__ import annotations

import gc
from pathlib import Path
from statistics import median
from typing import Any

from research.bench.engine.decode import decode_rows, random_tokens, seconds_per_step
from research.bench.frame import Record, Settings, run, table
from research.bench.host.load import LEAST_STEPS, MODEL, PROMPT_LENGTH, Load
from research.bench.peaks.memory import measure_memory
from research.bench.peaks.rates import memory_peak, memory_table
from srm.engine.config import CPU_STEP_ROWS, DEMO_MODEL, EngineConfig
from srm.engine.device.libc import keep_freed_memory
from srm.engine.device.runner import ModelRunner
from srm.engine.weights.checkpoint import load_checkpoint
from srm.memory import collect_rarely

WARM_UP = 4
"""Turns before each measurement, until the pipeline is full and every sequence has forked."""


class HostBenchConfig(Settings, frozen=True, forbid_unknown_fields=True):
    """Settings of `srm bench host`."""

    running: tuple[int, ...] = (1_000, 10_000, 100_000, 500_000, 1_000_000)
    """Numbers of sequences that run at once."""
    turn_rows: int = 65_536
    """Most rows in a step; more running sequences than this take turns."""
    length: int = 128
    """Tokens in each sequence where sequences end and are replaced."""
    samples: int = 64
    """Completions of each request where sequences end and are replaced."""
    repetitions: int = 3
    """Measurements of each figure; the median is reported, the record has all."""
    seconds: float = 1.0
    """Least time of one repetition, in seconds."""
    model: Path = DEMO_MODEL
    """Checkpoint whose step on the processor the host's time is compared with; none if the folder
    is missing."""
    cache_dir: Path = EngineConfig().cache_dir
    """Folder where compiled graphs are kept between runs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.length > MODEL.n_ctx - PROMPT_LENGTH:
            raise ValueError(f"length must be 1 … {MODEL.n_ctx - PROMPT_LENGTH}")


def main(argv: list[str]) -> int:
    """Measure, write a record and its plot, print its table."""
    return run(HostBenchConfig, argv, "host", measure, markdown)


def measure(config: HostBenchConfig) -> Record:
    """Return the cases, a model's step and the memory's peak."""
    keep_freed_memory()
    collect_rarely()  # both as an engine process does
    record: Record = {"memory_before": measure_memory("cpu", config.repetitions)}
    record["step"] = _measure_step(config) if config.model.exists() else None
    record["cases"] = [
        _measure_case(running, rows, length, config)
        for running in config.running
        for rows in sorted({running, min(running, config.turn_rows)}, reverse=True)
        for length in (None, config.length)
    ]
    record["memory_after"] = measure_memory("cpu", config.repetitions)
    record["peak_gb_per_s"] = memory_peak(record["memory_before"] + record["memory_after"])
    return record


def _measure_step(config: HostBenchConfig) -> dict[str, Any]:
    """Measure a decode step of the model with a CPU's default number of rows."""
    weights = load_checkpoint(config.model)
    served = EngineConfig(num_slots=CPU_STEP_ROWS, prefix_slots=1, cache_dir=config.cache_dir)
    runner = ModelRunner(weights, served)
    (tokens,) = random_tokens(weights.config, 1, CPU_STEP_ROWS)
    batch = decode_rows(tokens, 0)
    raw = [seconds_per_step(runner, batch, config.seconds) for _ in range(config.repetitions)]
    runner.close()
    return {
        "model": config.model.name,
        "d_model": weights.config.d_model,
        "rows": CPU_STEP_ROWS,
        "row_ns": 1e9 * median(raw) / CPU_STEP_ROWS,
        "raw": raw,
    }


def _measure_case(
    running: int, rows: int, length: int | None, config: HostBenchConfig
) -> dict[str, Any]:
    turns = -(-running // rows)
    warm_up = turns * (WARM_UP + (length or 0))  # until sequences of all ages have ended
    lasting = turns * (MODEL.n_ctx - PROMPT_LENGTH) - warm_up if length is None else None
    raw = []
    for _ in range(config.repetitions):
        gc.collect()
        load = Load(running, rows, length, config.samples)
        load.run(0, warm_up)
        raw.append(load.run(config.seconds, LEAST_STEPS, lasting).entry())
    names = ("add", "schedule", "complete", "ended_per_row")
    slots = load.scheduler.table
    return {
        "running": running,
        "rows": rows,
        "length": length,
        **{name: median(entry[name] for entry in raw) for name in names},
        "bytes_per_row": load.bytes_per_row(),
        "bytes_per_slot": slots.nbytes / slots.num_slots,
        "raw": raw,
    }


def markdown(record: Record) -> list[str]:
    """Render the record as a table."""
    cases, step, peak = record["cases"], record["step"], record["peak_gb_per_s"]
    measured = "No model's step was measured."
    if step is not None:
        measured = (
            f"A step is one of model {step['model']} (d {step['d_model']}) with {step['rows']:,} "
            f"rows on all cores, float32, {step['row_ns']:,.0f} ns a row."
        )
    rows = []
    for case in cases:
        both = case["schedule"] + case["complete"]
        part = f"{both / step['row_ns']:.2%}" if step else "–"
        rate = case["bytes_per_row"] / both
        rows.append(
            f"{case['running']:,} | {_name(case)} | {case['schedule']:.1f} "
            f"| {case['complete']:.1f} | {both:.1f} | {part} | {rate:.2f} | {rate / peak:.0%} "
            f"| {case['add']:.1f}"
        )
    return [
        "Host time per decode row on one core, in nanoseconds, with results that are there at "
        f"once. `add` takes requests in; it is no part of a step. {measured} GB/s count a step's "
        "arrays, written once, and its result, read once; the memory's peak, of all cores, is "
        f"{peak:.1f} GB/s in this run.",
        "",
        *table(
            "running | sequences | schedule | complete | both | of a step | GB/s | of the peak "
            "| add",
            rows,
        ),
        "",
        f"The host's arrays take up to {cases[0]['bytes_per_slot']:,.0f} bytes a slot.",
        "",
        *memory_table(record),
    ]


def _name(case: dict[str, Any]) -> str:
    rows = "in one step" if case["rows"] == case["running"] else f"in turns of {case['rows']:,}"
    going_on = "going on" if case["length"] is None else f"replaced after {case['length']} tokens"
    return f"{rows}, {going_on}"
