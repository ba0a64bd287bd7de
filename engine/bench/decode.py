"""`srm bench engine`: tokens a second by batch size, as a fraction of this machine's GEMM peak.

Everything a served token needs is in the measured loop (scheduling, the step graph with its state,
sampling at temperature 1, feedback, completion); only HTTP and text are not.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np

from engine.bench.gemm import gemm_table
from engine.bench.models import BenchConfig, check_sizes, measure_models
from engine.checkpoint import load_checkpoint
from engine.config import EngineConfig, ModelConfig, load
from engine.engine import Engine
from engine.messages import Request, SamplingParams
from engine.records import write_record
from engine.runner import ModelRunner


class EngineBenchConfig(BenchConfig, frozen=True, forbid_unknown_fields=True):
    """Settings of `srm bench engine`."""

    batch_sizes: tuple[int, ...] = (1, 4, 16, 64, 256, 1024, 2048, 4096)
    """Sequences that decode at once."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sizes("batch_sizes", self.batch_sizes)


def main(argv: list[str]) -> int:
    """Measure, write a record, print its table."""
    config = load(EngineBenchConfig, argv, prog="srm bench engine")
    command = " ".join(["srm bench engine", *argv])
    record = measure_models(config, command, lambda path: _measure_model(path, config))
    path = write_record(record, "engine", markdown(record), config.output)
    sys.stdout.write(f"{path.read_text()}\n{path}\n")
    return 0


def _measure_model(path: Path, config: EngineBenchConfig) -> dict[str, Any]:
    weights = load_checkpoint(path)
    started = time.monotonic()
    runner = ModelRunner(weights, settings_for(max(config.batch_sizes)))
    entry = {
        "config": msgspec.to_builtins(weights.config),
        "flops_per_token": weights.config.flops_per_token,
        "start_s": time.monotonic() - started,
        "batches": [
            measure_decode(weights.config, runner, batch_size, config)
            for batch_size in config.batch_sizes
        ],
    }
    runner.close()
    return entry


def settings_for(batch_size: int) -> EngineConfig:
    """Of an engine that decodes so many sequences in every step."""
    return EngineConfig(
        num_slots=batch_size + 2, max_step_rows=batch_size, max_step_tokens=2 * batch_size
    )


def measure_decode(
    model: ModelConfig, runner: ModelRunner, batch_size: int, config: BenchConfig
) -> dict[str, Any]:
    """Tokens a second with `batch_size` sequences running, one repetition after the other."""
    engine = Engine(model, runner, settings_for(batch_size))
    rates = []
    for repetition in range(config.repetitions):
        tokens, seconds = 0, 0.0
        while seconds < config.seconds:
            engine.add(_endless(model, batch_size, repetition))
            for _ in range(3):  # the pipeline fills, and every sequence has forked
                engine.step_overlapped()
            started, before = time.perf_counter(), engine.num_steps
            while engine.has_request("bench") and seconds < config.seconds:
                engine.step_overlapped()
                seconds_now = time.perf_counter() - started
                if seconds + seconds_now >= config.seconds:
                    break
            seconds += time.perf_counter() - started
            tokens += (engine.num_steps - before) * batch_size
            engine.abort("bench")
            while engine.has_work:
                engine.step()
        rates.append(tokens / seconds)
    return {"batch_size": batch_size, "tokens_per_s": median(rates), "raw": rates}


def _endless(model: ModelConfig, batch_size: int, seed: int) -> Request:
    return Request(
        id="bench",
        prompt_token_ids=np.zeros(1, "<i4").tobytes(),
        params=SamplingParams(
            n=batch_size, max_tokens=model.n_ctx, temperature=1.0, ignore_eos=True, seed=seed
        ),
    )


def markdown(record: dict[str, Any]) -> str:
    """The record as tables."""
    peak = record["peak_gflops"]
    lines = [
        f"Float32 GEMM peak of this run: {peak:.0f} GFLOP/s. Tokens a second are medians over "
        "whole engine steps with sampling at temperature 1; raw numbers are in the JSON file.",
        "",
        "| model | batch | tok/s | GFLOP/s | of the peak |",
        "|---|---|---|---|---|",
    ]
    for model in record["models"]:
        for batch in model["batches"]:
            gflops = batch["tokens_per_s"] * model["flops_per_token"] / 1e9
            lines.append(
                f"| {model['name']} | {batch['batch_size']} | {batch['tokens_per_s']:,.0f} "
                f"| {gflops:.0f} | {gflops / peak:.0%} |"
            )
    return "\n".join([*lines, "", *gemm_table(record)]) + "\n"
