"""`srm bench simulate`: the real scheduler driving a simulated GPU.

The host's time is real and measured. The device is a clock: a step takes as long as its matrix
products would at the given rate, plus the memory traffic that cannot overlap with them, plus the
copies of its inputs and results. Steps are scheduled, packed for their upload by the code that
serves, and launched while the previous one is under way, whose tokens are read only then
(`engine.device.gpu_steps`); so the host costs nothing until it is slower than the device. The
faster the assumed device, the harder it is on the host.
"""

from __future__ import annotations

import time
from itertools import cycle, product
from typing import Any

from bench.frame import Record, Settings, run, table
from bench.host.load import LEAST_STEPS, Load
from engine.config import ModelConfig
from engine.device.gpu_steps import StepBuffers, padded_inputs
from engine.device.libc import keep_freed_memory
from engine.device.runner import open_device
from engine.steps.batch import Batch

HOST = ("add", "schedule", "enqueue", "complete")
RESULT_BYTES = 8
"""Bytes of a decode row's result: a token and its log-probability."""


class SimulationConfig(Settings, frozen=True, forbid_unknown_fields=True):
    """Settings of `srm bench simulate`. The defaults are an H200 as measured by torch."""

    widths: tuple[int, ...] = (512, 1024)
    """Values of d_model; each model has 8 layers and a vocabulary of 8,192 tokens."""
    running: int = 1_000_000
    """Sequences that run at once."""
    step_rows: tuple[int, ...] = (8_192, 65_536)
    """Rows in a step."""
    length: int = 128
    """Tokens in each sequence; sequences that end are replaced."""
    samples: int = 64
    """Completions of each request."""
    tflops: float = 790.0
    """Device's rate of matrix products in bfloat16, in TFLOP/s."""
    tb_per_s: float = 4.3
    """Bandwidth of the device's memory, in TB/s."""
    gb_per_s: float = 50.0
    """Bandwidth between host and device in each direction, in GB/s."""
    launch_us: float = 200.0
    """Time that the host takes to launch a step's kernels, in microseconds."""
    efficiencies: tuple[float, ...] = (0.6, 1.0)
    """Fractions of both rates that the step reaches."""
    seconds: float = 10.0
    """Least time of one measurement, in seconds."""


def main(argv: list[str]) -> int:
    """Simulate, write a record and its plot, print its table."""
    return run(SimulationConfig, argv, "simulate", measure, markdown)


def measure(config: SimulationConfig) -> Record:
    """Return the cases."""
    keep_freed_memory()
    kinds = product(config.widths, config.step_rows, config.efficiencies)
    return {"cases": [_simulate(*kind, config) for kind in kinds]}


def device_s_per_token(model: ModelConfig, tflops: float, tb_per_s: float) -> float:
    """Return a device's seconds per decoded token: its products, then its memory traffic.

    The traffic is the state, read and written in float32, and the logits, written and read in
    bfloat16; activations are assumed to stay in the cache.
    """
    moved = 2 * 4 * model.state_width + 2 * 2 * model.vocab_size
    return model.flops_per_token / (tflops * 1e12) + moved / (tb_per_s * 1e12)


class Uploads:
    """Packs inputs of steps into memory of the host, as for a GPU; nothing copies them on."""

    def __init__(self, config: SimulationConfig) -> None:
        self._config = config
        self._sets = cycle([StepBuffers(open_device("cpu")) for _ in range(2)])

    def enqueue(self, batch: Batch) -> tuple[float, float]:
        """Return the seconds that launching takes besides, and those of the copies."""
        _, size = next(self._sets).pack(padded_inputs(batch, self._config.running))
        size += RESULT_BYTES * batch.num_decode
        return self._config.launch_us / 1e6, size / (self._config.gb_per_s * 1e9)


def _simulate(width: int, rows: int, efficiency: float, config: SimulationConfig) -> dict[str, Any]:
    model = ModelConfig(d_model=width, num_layers=8, num_heads=4, n_ctx=512, vocab_size=8192)
    row_s = device_s_per_token(model, efficiency * config.tflops, efficiency * config.tb_per_s)
    uploads = Uploads(config)
    load = Load(config.running, rows, config.length, config.samples, row_s, uploads.enqueue)
    turns = -(-config.running // rows)
    load.run(0, 2 * turns)
    started = time.perf_counter()
    cost = load.run(config.seconds, max(LEAST_STEPS, turns))
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


def markdown(record: Record) -> list[str]:
    """Render the record as a table."""
    settings = record["settings"]
    return [
        f"{settings['running']:,} running sequences of {settings['length']} tokens. The device is "
        f"counted, at a share of {settings['tflops']:.0f} TFLOP/s and {settings['tb_per_s']} TB/s, "
        f"with copies at {settings['gb_per_s']:.0f} GB/s and {settings['launch_us']:.0f} µs of the "
        "host to launch a step; "
        "the host is measured, one core, nanoseconds a decode row. `waits` is what the host has to "
        "spare; where it is near 0, the host is the limit.",
        "",
        *table(
            "d_model | rows a step | share | device tok/s | tok/s | of the device | host | waits",
            (
                f"{case['width']} | {case['step_rows']:,} | {case['efficiency']:.0%} "
                f"| {case['device_tokens_per_s']:,.0f} | {case['tokens_per_s']:,.0f} "
                f"| {case['tokens_per_s'] / case['device_tokens_per_s']:.0%} "
                f"| {sum(case[name] for name in HOST):.0f} | {case['wait']:.0f}"
                for case in record["cases"]
            ),
        ),
    ]
