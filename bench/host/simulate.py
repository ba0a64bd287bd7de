"""`srm bench simulate`: the real scheduler driving a simulated GPU.

The host's time is real and measured. The device is a clock: a step takes as long as its matrix
products would at the given rate, plus the memory traffic that cannot overlap with them. Steps are
scheduled while the previous one is under way, as in an engine, so the host costs nothing until it
is slower than the device. The faster the assumed device, the harder it is on the host.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec

from bench.host.load import LEAST_STEPS, Load
from bench.peaks.torch_side import plot_record
from engine.config import ModelConfig
from engine.device.libc import keep_freed_memory
from engine.records import RECORDS, new_record, settings_of, write_record
from engine.settings import load
from engine.steps.batch import Batch, StepResult


class SimulationConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of `srm bench simulate`. The defaults are an H200 as measured by torch."""

    widths: tuple[int, ...] = (512, 1024)
    """d_model of the models, of 8 layers and 8,192 tokens."""
    running: int = 1_000_000
    """Sequences that run at once."""
    step_rows: tuple[int, ...] = (8_192, 65_536)
    """Rows of a step."""
    length: int = 128
    """Tokens of each sequence; those that end are replaced."""
    samples: int = 64
    """Completions of each request."""
    tflops: float = 790.0
    """Matrix products in bfloat16 that the device does, in TFLOP/s."""
    tb_per_s: float = 4.3
    """Bytes that its memory moves, in TB/s."""
    efficiencies: tuple[float, ...] = (0.6, 1.0)
    """Shares of both rates that the step reaches."""
    seconds: float = 10.0
    """Least time of one measurement."""
    output: Path = RECORDS
    """Folder that the record is written to."""

    def __post_init__(self) -> None:
        given = (*self.widths, *self.step_rows, self.running, self.samples, self.length)
        rates = (*self.efficiencies, self.tflops, self.tb_per_s)
        if min(given) < 1 or min(rates) <= 0:
            raise ValueError(f"every setting of a simulation must be above 0, got {self}")


def device_s_per_token(model: ModelConfig, tflops: float, tb_per_s: float) -> float:
    """Return a device's seconds per decoded token: its products, then its memory traffic.

    The traffic is the state, read and written in float32, and the logits, written and read in
    bfloat16; activations are assumed to stay in the cache.
    """
    moved = 2 * 4 * model.state_width + 2 * 2 * model.vocab_size
    return model.flops_per_token / (tflops * 1e12) + moved / (tb_per_s * 1e12)


class PacedLoad(Load):
    """A load whose steps take `row_s` seconds of a device for each decode row."""

    def __init__(self, row_s: float, running: int, rows: int, length: int, samples: int) -> None:
        self._row_s = row_s
        self._ready: dict[int, float] = {}  # when each step under way is done, by the batch's id
        self._free_at = 0.0
        super().__init__(running, rows, length, samples)

    def launch(self, batch: Batch | None) -> None:
        if batch is not None:
            begin = max(time.perf_counter(), self._free_at)
            self._free_at = self._ready[id(batch)] = begin + self._row_s * batch.num_decode

    def result(self, batch: Batch) -> StepResult:
        left = self._ready.pop(id(batch)) - time.perf_counter()
        if left > 0:
            time.sleep(left)
        return super().result(batch)


def main(argv: list[str]) -> int:
    """Simulate, write a record and its plot, print its table."""
    config = load(SimulationConfig, argv, prog="srm bench simulate")
    keep_freed_memory()
    record = new_record(" ".join(["srm bench simulate", *argv]))
    record |= {"settings": settings_of(config)}
    record["cases"] = [
        _simulate(width, rows, efficiency, config)
        for width in config.widths
        for rows in config.step_rows
        for efficiency in config.efficiencies
    ]
    plot_record("simulate", write_record(record, "simulate", markdown(record), config.output))
    return 0


def _simulate(width: int, rows: int, efficiency: float, config: SimulationConfig) -> dict[str, Any]:
    model = ModelConfig(d_model=width, num_layers=8, num_heads=4, n_ctx=512, vocab_size=8192)
    row_s = device_s_per_token(model, efficiency * config.tflops, efficiency * config.tb_per_s)
    paced = PacedLoad(row_s, config.running, rows, config.length, config.samples)
    turns = -(-config.running // rows)
    paced.run(0, 2 * turns)
    started = time.perf_counter()
    cost = paced.run(config.seconds, max(LEAST_STEPS, turns))
    seconds = time.perf_counter() - started
    return {
        "width": width,
        "step_rows": rows,
        "efficiency": efficiency,
        "device_tokens_per_s": 1 / row_s,
        "tokens_per_s": cost.rows / seconds,
        "seconds": seconds,
        **cost.entry(),
    }


def markdown(record: dict[str, Any]) -> str:
    """Render the record as a table."""
    settings = record["settings"]
    lines = [
        f"{settings['running']:,} running sequences of {settings['length']} tokens. The device is "
        f"counted, at a share of {settings['tflops']:.0f} TFLOP/s and {settings['tb_per_s']} TB/s; "
        "the host is measured, one core, nanoseconds a decode row. `waits` is what the host has to "
        "spare; where it is near 0, the host is the limit.",
        "",
        "| d_model | rows a step | share | device tok/s | tok/s | of the device | host | waits |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case in record["cases"]:
        host = case["add"] + case["schedule"] + case["complete"]
        lines.append(
            f"| {case['width']} | {case['step_rows']:,} | {case['efficiency']:.0%} "
            f"| {case['device_tokens_per_s']:,.0f} | {case['tokens_per_s']:,.0f} "
            f"| {case['tokens_per_s'] / case['device_tokens_per_s']:.0%} "
            f"| {host:.0f} | {case['wait']:.0f} |"
        )
    return "\n".join(lines) + "\n"
