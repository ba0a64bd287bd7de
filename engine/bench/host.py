"""`srm bench host`: what a step costs the host, per decode row, from 1,000 to 1,000,000 sequences.

The scheduler runs as it does in an engine, each step scheduled before the one before it is
completed, on results that are there at once: what is left is schedule and complete. Twice: with
sequences that only go on, and with short ones that end and are replaced all the time. And twice
again: all running sequences in one step, and in turns. Knows no device and no weights.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np

from engine.batch import F32, I32, Batch, StepResult
from engine.config import EngineConfig, ModelConfig
from engine.libc import keep_freed_memory
from engine.memory import collect_rarely
from engine.messages import Request, SamplingParams
from engine.records import RECORDS, new_record, settings_of, write_record
from engine.scheduler import Scheduler
from engine.settings import load

MODEL = ModelConfig(d_model=512, num_layers=8, num_heads=4, n_ctx=512, vocab_size=8192)
"""Of the width nothing depends here."""
PROMPT_LENGTH = 8
WARM_UP = 4
"""Turns before each measurement: the pipeline fills, and every sequence has forked."""
LEAST_STEPS = 8
"""Of a measurement, however long they take."""


class HostBenchConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of `srm bench host`."""

    running: tuple[int, ...] = (1_000, 10_000, 100_000, 500_000, 1_000_000)
    """Sequences that run at once."""
    turn_rows: int = 65_536
    """Rows of a step where sequences take turns; fewer running sequences take none."""
    length: int = 128
    """Tokens of each sequence where sequences end and are replaced."""
    samples: int = 64
    """Completions of each request then."""
    repetitions: int = 3
    """Measurements of each figure; the median is reported, the record has them all."""
    seconds: float = 1.0
    """Least time of one repetition."""
    output: Path = RECORDS
    """Folder that the record is written to."""

    def __post_init__(self) -> None:
        counts = (*self.running, self.turn_rows, self.samples, self.repetitions)
        if not self.running or min(counts) < 1:
            raise ValueError(
                "running, turn_rows, samples and repetitions must be at least 1, and one of "
                "running given"
            )
        if not 1 <= self.length <= MODEL.n_ctx - PROMPT_LENGTH:
            raise ValueError(f"length must be 1 … {MODEL.n_ctx - PROMPT_LENGTH}")


def main(argv: list[str]) -> int:
    """Measure, write a record and its plot, print its table."""
    config = load(HostBenchConfig, argv, prog="srm bench host")
    keep_freed_memory()
    collect_rarely()  # both as an engine process does
    record = new_record(" ".join(["srm bench host", *argv]))
    record |= {"settings": settings_of(config)}
    record |= {"cases": [case for running in config.running for case in _cases(running, config)]}
    path = write_record(record, "host", markdown(record), config.output)
    if importlib.util.find_spec("matplotlib") is not None:
        plot(record, path.with_suffix(".svg"))
    return 0


def _cases(running: int, config: HostBenchConfig) -> list[dict[str, Any]]:
    """All in one step and in turns, going on and being replaced."""
    return [
        _measure(running, rows, length, config)
        for rows in sorted({running, min(running, config.turn_rows)}, reverse=True)
        for length in (None, config.length)
    ]


def _measure(
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
    medians = {name: median(entry[name] for entry in raw) for name in names}
    table = load.scheduler.table
    return {
        "running": running,
        "rows": rows,
        "length": length,
        **medians,
        "bytes_per_slot": table.nbytes / table.num_slots,
        "raw": raw,
    }


@dataclass(slots=True)
class Cost:
    """Seconds by what they went to, and what they bought."""

    add: float = 0.0
    schedule: float = 0.0
    wait: float = 0.0
    complete: float = 0.0
    rows: int = 0
    ended: int = 0
    steps: int = 0

    def entry(self) -> dict[str, float]:
        """Times in nanoseconds a decode row."""
        times = {name: getattr(self, name) for name in ("add", "schedule", "wait", "complete")}
        return {name: 1e9 * seconds / self.rows for name, seconds in times.items()} | {
            "ended_per_row": self.ended / self.rows,
            "rows": self.rows,
            "steps": self.steps,
        }


class Load:
    """A scheduler with `running` sequences, and a runner that has every result at once.

    Sequences of `length` tokens are replaced when they end; of None, they fill the context.
    """

    def __init__(self, running: int, rows: int, length: int | None, samples: int) -> None:
        self.scheduler = Scheduler(
            MODEL,
            EngineConfig(
                num_slots=running,
                prefix_slots=running // samples + 2,
                prefix_cache=False,  # all prompts are the same
                max_step_rows=rows,
                max_step_tokens=2 * rows + PROMPT_LENGTH * running,
                max_waiting=2 * running + samples,
            ),
        )
        self._length = length
        self._samples = min(samples, running)
        self._least_waiting = running // 4 if length else 0
        self._landing: Batch | None = None
        self._num_requests = 0
        rng = np.random.default_rng(0)
        # Made up, and none that ends a sequence.
        self._tokens: I32 = rng.integers(2, MODEL.vocab_size, rows, dtype=np.int32)
        self._logprobs: F32 = np.zeros(rows, np.float32)
        if length is None:
            self._add(running, MODEL.n_ctx)
        else:  # the first ones have all ages, so that about as many end in every step
            for age in rng.integers(0, length, running // self._samples).tolist():
                self._add(self._samples, length - age)

    def run(self, seconds: float, least_steps: int, most_steps: int | None = None) -> Cost:
        """Step for so long, and for so many steps."""
        cost, began = Cost(), time.perf_counter()
        while cost.steps < least_steps or time.perf_counter() - began < seconds:
            self._step(cost)
            if cost.steps == most_steps:
                break
        return cost

    def _step(self, cost: Cost) -> None:
        clock = time.perf_counter
        started = clock()
        while self.scheduler.num_waiting < self._least_waiting:
            self._add(self._samples, self._length or 0)
        added = clock()
        batch = self.scheduler.schedule()
        scheduled = clock()
        outputs = []
        self.scheduler.latencies.now = added
        self.launch(batch)
        if self._landing is not None:
            result = self.result(self._landing)
            waited = clock()
            self.scheduler.latencies.now = waited
            outputs = self.scheduler.complete(self._landing, result)
            self.scheduler.latencies.publish(is_idle=False)
            cost.rows += self._landing.num_decode
        else:
            waited = scheduled
        completed = clock()
        self._landing = batch
        cost.add += added - started
        cost.schedule += scheduled - added
        cost.wait += waited - scheduled
        cost.complete += completed - waited
        cost.ended += len(outputs)
        cost.steps += 1

    def launch(self, batch: Batch | None) -> None:
        """Begin a step: no device does anything with it."""

    def result(self, batch: Batch) -> StepResult:
        """What a step sampled."""
        return StepResult(self._tokens[: batch.num_decode], self._logprobs[: batch.num_decode])

    def _add(self, n: int, max_tokens: int) -> None:
        self._num_requests += 1
        params = SamplingParams(
            n=n, max_tokens=max_tokens, temperature=1.0, top_p=0.9, seed=self._num_requests
        )
        prompt = np.full(PROMPT_LENGTH, 2, "<i4").tobytes()
        request = Request(id=str(self._num_requests), prompt_token_ids=prompt, params=params)
        self.scheduler.add(request)


def _name(case: dict[str, Any]) -> str:
    rows = "in one step" if case["rows"] == case["running"] else f"in turns of {case['rows']:,}"
    going_on = "going on" if case["length"] is None else f"replaced after {case['length']} tokens"
    return f"{rows}, {going_on}"


def markdown(record: dict[str, Any]) -> str:
    """The record as a table."""
    bytes_per_slot = record["cases"][0]["bytes_per_slot"]
    lines = [
        "Host time per decode row on one core, in nanoseconds, with results that are there at "
        "once. `add` takes requests in; it is no part of a step.",
        "",
        "| running | sequences | schedule | complete | both | add |",
        "|---|---|---|---|---|---|",
    ]
    for case in record["cases"]:
        both = case["schedule"] + case["complete"]
        lines.append(
            f"| {case['running']:,} | {_name(case)} | {case['schedule']:.1f} "
            f"| {case['complete']:.1f} | {both:.1f} | {case['add']:.1f} |"
        )
    lines += ["", f"The host's arrays take up to {bytes_per_slot:,.0f} bytes a slot."]
    return "\n".join(lines) + "\n"


def plot(record: dict[str, Any], path: Path) -> None:
    """Schedule and complete per row by running sequences, a line for each kind of case, as SVG."""
    mpl = importlib.import_module("matplotlib")
    mpl.use("svg")  # no display needed
    mpl.rcParams["svg.hashsalt"] = "srm"  # the same picture for the same numbers
    figure, axes = importlib.import_module("matplotlib.pyplot").subplots(figsize=(7, 4))
    for name in dict.fromkeys(map(_name, record["cases"])):
        cases = [case for case in record["cases"] if _name(case) == name]
        both = [case["schedule"] + case["complete"] for case in cases]
        axes.plot([case["running"] for case in cases], both, marker="o", markersize=3, label=name)
    axes.set(xscale="log", yscale="log")
    axes.set(xlabel="running sequences", ylabel="host time per decode row (ns)")
    axes.grid(which="both", linewidth=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
