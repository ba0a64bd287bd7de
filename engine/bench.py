"""`srm bench engine`: tokens a second by batch size, as a fraction of this machine's GEMM peak.

Everything a served token needs is in the measured loop (scheduling, the step graph with its state,
sampling at temperature 1, feedback, completion); only HTTP and text are not. The peak is the best
float32 matrix product found in the same run. Records go to docs/benchmarks/ with the raw numbers.
"""

from __future__ import annotations

import gc
import importlib.util
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np
from max.driver import CPU, Buffer
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType, ops

from engine.checkpoint import load_checkpoint
from engine.config import DEMO_MODEL, EngineConfig, ModelConfig, load
from engine.engine import Engine
from engine.errors import ConfigError
from engine.linear import KERNELS, linear, linear_shape, pack_linear
from engine.messages import Request, SamplingParams
from engine.random_model import write_random_model
from engine.records import RECORDS, ROOT, new_record, write_record
from engine.runner import ModelRunner
from engine.weights import Weights

GEMM_ROWS = (256, 1024, 2048)
GEMM_SHAPES = ((512, 2048), (1024, 4096))


class BenchConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of `srm bench engine`."""

    demo_model: Path = DEMO_MODEL
    """A checkpoint to measure; left out where the folder is missing."""
    random_widths: tuple[int, ...] = (512, 1024)
    """d_model of further models, with random weights."""
    batch_sizes: tuple[int, ...] = (1, 4, 16, 64, 256, 1024, 2048, 4096)
    """Sequences that decode at once."""
    repetitions: int = 5
    """Measurements of each figure; the median is reported, the record has them all."""
    seconds: float = 1.0
    """Least time of one repetition."""
    output: Path = RECORDS
    """Folder that the record is written to."""

    def __post_init__(self) -> None:
        if not self.batch_sizes or min(*self.batch_sizes, self.repetitions) < 1:
            raise ValueError("batch_sizes and repetitions must be at least 1, and one size given")
        if any(width < 4 or width % 4 for width in self.random_widths):
            raise ValueError(f"random_widths must be multiples of 4, got {self.random_widths}")


def main(argv: list[str]) -> int:
    """Measure, write a record, print its table."""
    if argv[:1] != ["engine"]:
        raise ConfigError(f"srm bench measures engine, http or precision, got {argv[:1]}")
    config = load(BenchConfig, argv[1:], prog="srm bench engine")
    record = measure(config, " ".join(["srm bench", *argv]))
    path = write_record(record, "engine", markdown(record), config.output)
    sys.stdout.write(f"{path.read_text()}\n{path}\n")
    return 0


def measure(config: BenchConfig, command: str) -> dict[str, Any]:
    """The whole record: machine, GEMM peaks before and after, and every model."""
    record = new_record(command)
    record |= {"gemm_before": gemm_gflops(config.repetitions), "models": []}
    with tempfile.TemporaryDirectory() as folder:
        if config.demo_model.exists():
            record["models"].append(_measure_model("demo", config.demo_model, config))
        for width in config.random_widths:
            shape = ModelConfig(
                d_model=width, num_layers=8, num_heads=4, n_ctx=512, vocab_size=8192
            )
            path = Path(folder) / f"d{width}"
            write_random_model(path, shape)
            record["models"].append(_measure_model(f"random d {width}", path, config))
    record["gemm_after"] = gemm_gflops(config.repetitions)
    peaks = record["gemm_before"] + record["gemm_after"]
    record["peak_gflops"] = max(entry["gflops"] for entry in peaks)
    return record


def _measure_model(name: str, path: Path, config: BenchConfig) -> dict[str, Any]:
    weights = load_checkpoint(path)
    largest = max(config.batch_sizes)
    engine_config = EngineConfig(
        num_slots=largest + 2, max_step_rows=largest, max_step_tokens=2 * largest
    )
    started = time.monotonic()
    runner = ModelRunner(weights, engine_config)
    entry = {
        "name": name,
        "config": msgspec.to_builtins(weights.config),
        "flops_per_token": weights.config.flops_per_token,
        "start_s": time.monotonic() - started,
        "batches": [
            _measure_batch(weights, runner, engine_config, batch_size, config)
            for batch_size in config.batch_sizes
        ],
    }
    runner.close()
    del runner
    gc.collect()
    return entry


def _measure_batch(
    weights: Weights,
    runner: ModelRunner,
    engine_config: EngineConfig,
    batch_size: int,
    config: BenchConfig,
) -> dict[str, Any]:
    """Tokens a second with `batch_size` sequences running, one repetition after the other."""
    engine = Engine(weights.config, runner, engine_config)
    rates = []
    for repetition in range(config.repetitions):
        tokens, seconds = 0, 0.0
        while seconds < config.seconds:
            engine.add(_endless(weights.config, batch_size, repetition))
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


def _endless(config: ModelConfig, batch_size: int, seed: int) -> Request:
    return Request(
        id="bench",
        prompt_token_ids=np.zeros(1, "<i4").tobytes(),
        params=SamplingParams(
            n=batch_size, max_tokens=config.n_ctx, temperature=1.0, ignore_eos=True, seed=seed
        ),
    )


def gemm_gflops(repetitions: int) -> list[dict[str, Any]]:
    """Float32 matrix products on this machine: ours, MAX's, numpy's, and oneDNN's if torch is."""
    found = []
    session = InferenceSession(devices=[CPU()])
    for inner, columns in GEMM_SHAPES:
        weight = np.random.default_rng(0).standard_normal((inner, columns), np.float32)
        ours = session.load(_gemm_graph(inner, columns, packed=True))
        theirs = session.load(_gemm_graph(inner, columns, packed=False))
        packed, plain = Buffer.from_numpy(pack_linear(weight)), Buffer.from_numpy(weight)
        for rows in GEMM_ROWS:
            x = np.random.default_rng(1).standard_normal((rows, inner), np.float32)
            x_buffer, flops = Buffer.from_numpy(x), 2 * rows * inner * columns
            runs = {
                "srm_linear": lambda m=ours, b=x_buffer, w=packed: m.execute(b, w),
                "MAX matmul": lambda m=theirs, b=x_buffer, w=plain: m.execute(b, w),
                "numpy": lambda a=x, w=weight: a @ w,
            }
            for name, run in runs.items():
                gflops = flops / _seconds(run, repetitions) / 1e9
                found.append({"by": name, "shape": [rows, inner, columns], "gflops": gflops})
    return found + _onednn_gflops()


def _gemm_graph(inner: int, columns: int, packed: bool) -> Graph:
    on = DeviceRef.CPU()
    shape = linear_shape(inner, columns, on) if packed else (inner, columns)
    types = [TensorType(DType.float32, ["rows", inner], on), TensorType(DType.float32, shape, on)]
    with Graph(
        f"gemm_{inner}_{columns}_{packed}", input_types=types, custom_extensions=[KERNELS]
    ) as graph:
        x, weight = (value.tensor for value in graph.inputs)
        graph.output(linear(x, weight, columns) if packed else ops.matmul(x, weight))
    return graph


def _seconds(run: Any, repetitions: int) -> float:
    """Median time of one call, each repetition at least 0.2 s of calls."""
    run()
    times = []
    for _ in range(repetitions):
        calls, started = 0, time.perf_counter()
        while time.perf_counter() - started < 0.2:
            run()
            calls += 1
        times.append((time.perf_counter() - started) / calls)
    return median(times)


def _onednn_gflops() -> list[dict[str, Any]]:
    """In a process of its own, since the engine knows no torch; nothing where it is missing."""
    if importlib.util.find_spec("torch") is None:
        return []
    output = subprocess.run(
        [sys.executable, "-m", "training.gemm_peak"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    found: list[dict[str, Any]] = msgspec.json.decode(output)
    return found


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
    lines += ["", "| GEMM by | shape | GFLOP/s before | after |", "|---|---|---|---|"]
    for before, after in zip(record["gemm_before"], record["gemm_after"], strict=True):
        shape = "×".join(map(str, before["shape"]))
        lines.append(
            f"| {before['by']} | {shape} | {before['gflops']:.0f} | {after['gflops']:.0f} |"
        )
    return "\n".join(lines) + "\n"
