"""`srm bench engine`: tokens a second by batch size, as a fraction of this machine's GEMM peak.

The same run also measures the model as a PyTorch recurrence, eager and compiled
(`research/bench/model/recurrence.py`), the sampler's part of a step, and the time of a start.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import msgspec

from research.bench.engine.decode import measure_decode, measure_sampler, settings_for
from research.bench.engine.models import BenchConfig, measure_models
from research.bench.engine.startup import measure_startup
from research.bench.frame import Record, run, table
from research.bench.peaks.rates import (
    byte_cells,
    bytes_moved,
    peak_line,
    peak_tables,
    rate_cells,
    runs_of,
    start_cells,
)
from research.bench.peaks.torch_side import ask_torch, has_torch
from srm.engine.config import Dtype
from srm.engine.device.runner import ModelRunner
from srm.engine.weights.checkpoint import load_checkpoint
from srm.engine.weights.step_bytes import decode_bytes
from srm.engine.weights.weights import Weights


class EngineBenchConfig(BenchConfig, frozen=True, forbid_unknown_fields=True):
    """Settings of `srm bench engine`."""

    batch_sizes: tuple[int, ...] = (1, 4, 16, 64, 256, 1024, 2048, 4096)
    """Numbers of sequences that decode at once."""
    pytorch: bool = True
    """Whether models of plain mixers are also measured as a PyTorch recurrence, where torch is
    installed."""
    pytorch_rows: int = 65_536
    """Most sequences that the PyTorch recurrence decodes at once, as it needs more memory."""
    top_p: float = 1.0
    """Top-p of the sampling, at temperature 1, where tokens a second are measured."""
    turn_rows: int = 1_048_576
    """Most rows in a step; more running sequences than this take turns."""
    fill_memory: bool = False
    """Whether to measure also with as many running sequences as num_slots = 0 gives slots."""
    cold_start: bool = True
    """Whether to measure also a start with empty caches, which compiles; if not, graphs must be in
    cache_dir."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.top_p > 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")


def main(argv: list[str]) -> int:
    """Measure, write a record, print its tables."""
    return run(EngineBenchConfig, argv, "engine", measure, markdown)


def measure(config: EngineBenchConfig) -> Record:
    """Return each model's rates, and the peaks."""
    models = measure_models(config, lambda path: _measure_model(path, config))
    return models | {"top_p": config.top_p}


def _measure_model(path: Path, config: EngineBenchConfig) -> dict[str, Any]:
    weights = load_checkpoint(path)
    runs = [_measure_engine(path, weights, dtype, config) for dtype in config.dtypes]
    if config.pytorch and has_torch(config.device) and _is_plain(weights):
        runs += _measure_pytorch(path, config)
    return {
        "config": msgspec.to_builtins(weights.config),
        "flops_per_token": weights.config.flops_per_token,
        "bytes": {
            dtype: decode_bytes(weights.config, dtype, config.device)._asdict()
            for dtype in config.dtypes
        },
        "runs": runs,
    }


def _measure_engine(
    path: Path, weights: Weights, dtype: Dtype, config: EngineBenchConfig
) -> dict[str, Any]:
    model, most = weights.config, max(config.batch_sizes)
    startup = measure_startup(path, dtype, config, cold=config.cold_start)
    settings = settings_for(config, dtype, most, min(most, config.turn_rows))
    runner = ModelRunner(weights, settings, config.variants)

    def measure(runner: ModelRunner, size: int) -> dict[str, Any]:
        turn_rows, top_p = config.turn_rows, config.top_p
        return measure_decode(model, runner, size, config, turn_rows=turn_rows, top_p=top_p)

    batches = [measure(runner, size) for size in config.batch_sizes]
    sampler = measure_sampler(model, runner, max(batches, key=_rate)["rows"], config)
    runner.close()
    if config.fill_memory:
        del runner
        gc.collect()  # the pool's memory is needed for the larger one
        settings = settings_for(config, dtype, 0, config.turn_rows)
        runner = ModelRunner(weights, settings, config.variants)
        batches.append(measure(runner, runner.num_slots))
        runner.close()
    return {"by": "srm", "dtype": dtype, "startup": startup, "batches": batches, "sampler": sampler}


def _is_plain(weights: Weights) -> bool:
    """Whether all layers have one unit without γ and taps, as the PyTorch recurrence requires."""
    units = [unit for layer in weights.layers for unit in layer.units]
    return len(units) == len(weights.layers) and all(
        unit.gamma is None and unit.taps is None for unit in units
    )


def _measure_pytorch(path: Path, config: EngineBenchConfig) -> list[dict[str, Any]]:
    """Return the runs of `research.bench.model.recurrence_rate`, in the form of ours."""
    task = {
        "model": str(path.resolve()),
        "device": config.device,
        "dtypes": config.dtypes,
        "batch_sizes": [size for size in config.batch_sizes if size <= config.pytorch_rows],
        "repetitions": config.repetitions,
        "seconds": config.seconds,
    }
    runs: list[dict[str, Any]] = ask_torch("recurrence_rate", task)
    return runs


def _rate(batch: dict[str, Any]) -> float:
    return float(batch["tokens_per_s"])


def markdown(record: Record) -> list[str]:
    """Render the record as tables."""
    runs = runs_of(record)
    ours = [(model, run) for model, run in runs if run["by"] == "srm"]
    heads = "model | by | dtype | batch | step | tok/s | GFLOP/s | of the peak | GB/s | of the peak"
    top_p = "" if record["top_p"] == 1 else f" (the engine's with top-p {record['top_p']})"
    return [
        f"{peak_line(record)} Tokens a second are medians over whole steps with sampling at "
        f"temperature 1{top_p} and feedback; raw numbers are in the JSON file. Operations "
        "are those of the matrix products, bytes those that no cache can be asked to keep: every "
        "matrix once a step, and a row's embedding, state and logits (`bench/engine/counts.py`).",
        "",
        "Best batch size of each:",
        "",
        *table(
            heads,
            (_row(record, model, run, max(run["batches"], key=_rate)) for model, run in runs),
        ),
        "",
        "The sampler's part of a step at that batch size: the step that samples against the same "
        "rows through the same graph as far as the logits.",
        "",
        *table(
            "model | dtype | batch | step | to the logits | sampler | with top-p 0.9",
            (_sampler_row(model, run) for model, run in ours),
        ),
        "",
        "From the command to the first sampled token. *cold*: all caches empty, so the step graph "
        "is compiled. PyTorch: the first steps of all batch sizes, compilation included, which no "
        "other figure has in it.",
        "",
        *table(
            "model | by | dtype | cold | warm",
            (
                f"{model['name']} | {run['by']} | {run['dtype']} | {' | '.join(start_cells(run))}"
                for model, run in runs
            ),
        ),
        "",
        *table(
            heads,
            (_row(record, model, run, batch) for model, run in runs for batch in run["batches"]),
        ),
        "",
        *peak_tables(record),
    ]


def _row(record: Record, model: Record, run: Record, batch: Record) -> str:
    size: int = batch["batch_size"]
    rows: int = batch.get("rows", size)
    seconds = rows / batch["tokens_per_s"]
    moved = bytes_moved(model, run["dtype"], rows)
    return (
        f"{model['name']} | {run['by']} | {run['dtype']} "
        f"| {size}{'' if size == rows else f', {rows} a step'} | {seconds * 1e3:.1f} ms "
        f"| {rate_cells(record, run['dtype'], batch['tokens_per_s'], model['flops_per_token'])} "
        f"| {byte_cells(record, moved, seconds)}"
    )


def _sampler_row(model: Record, run: Record) -> str:
    sampler = run["sampler"]
    plain, logits, top_p = (sampler[name] for name in ("sampled_s", "unsampled_s", "top_p_s"))
    return (
        f"{model['name']} | {run['dtype']} | {sampler['batch_size']} | {plain * 1e3:.1f} ms "
        f"| {logits * 1e3:.1f} ms | {1 - logits / plain:.1%} | {1 - logits / top_p:.1%}"
    )
