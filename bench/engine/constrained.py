"""`srm bench constrained`: what constraints cost, by the part of the rows that have one.

Rows under a constraint write a list of objects that does not end, rows without one any text. All
cases take turns, so that other load on the machine affects all alike.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from msgspec.structs import replace

from bench.engine.decode import settings_for
from bench.engine.models import BenchConfig, measure_each
from bench.frame import Record, run, table
from srm.engine.config import DEMO_MODEL, Dtype, ModelConfig
from srm.engine.constraints.constraint import json_constraint
from srm.engine.device.libc import keep_freed_memory
from srm.engine.device.runner import ModelRunner
from srm.engine.messages import Request, SamplingParams
from srm.engine.process.engine import Engine
from srm.engine.weights.checkpoint import load_checkpoint

SHARES = (0.0, 0.05, 0.5, 1.0)
"""Parts of the rows that have a constraint."""


class ConstrainedBenchConfig(BenchConfig, frozen=True, forbid_unknown_fields=True):
    """Settings of `srm bench constrained`."""

    rows: int = 2_048
    """Sequences that run at once."""
    constraints: tuple[int, ...] = (1, 100, 1_000)
    """Numbers of different constraints that those rows have."""


def main(argv: list[str]) -> int:
    """Measure, write a record, print its tables."""
    return run(ConstrainedBenchConfig, argv, "constrained", measure, markdown)


def measure(config: ConstrainedBenchConfig) -> Record:
    """Return each model's rates."""
    keep_freed_memory()  # as an engine process does
    return {"models": measure_each(config, lambda path: _measure_model(path, config))}


def _measure_model(path: Path, config: ConstrainedBenchConfig) -> dict[str, Any]:
    if not (path / "tokenizer.json").exists():  # ids beyond its own are never allowed
        shutil.copy(DEMO_MODEL / "tokenizer.json", path)
    weights = load_checkpoint(path)
    runs = []
    for dtype in config.dtypes:
        runner = ModelRunner(weights, settings_for(config, dtype, config.rows))
        runs.append(_measure_engine(path, weights.config, runner, dtype, config))
        runner.close()
    return {"runs": runs}


def _measure_engine(
    path: Path,
    model: ModelConfig,
    runner: ModelRunner,
    dtype: Dtype,
    config: ConstrainedBenchConfig,
) -> dict[str, Any]:
    cases: list[dict[str, Any]] = [{"share": 0.0, "constraints": 0}]
    cases += [{"share": own, "constraints": k} for own in SHARES[1:] for k in config.constraints]
    for case in cases:
        case["raw"] = []
    for _ in range(config.repetitions):
        for case in cases:
            settings = replace(settings_for(config, dtype, config.rows), model=path)
            engine = Engine(model, runner, settings)
            case["raw"].append(_rates(engine, model, case, config))
    for case in cases:
        for name in ("free_per_s", "masked_per_s", "mask_us"):
            case[name] = median(raw[name] for raw in case["raw"])
    return {"dtype": dtype, "cases": cases}


def _rates(
    engine: Engine, model: ModelConfig, case: dict[str, Any], config: ConstrainedBenchConfig
) -> dict[str, float]:
    """Return tokens a second of both kinds of rows, and microseconds of the host a mask."""
    masked = round(config.rows * case["share"])
    if masked < config.rows:
        engine.add(_request("free", config.rows - masked, model, ""))
    kinds = min(case["constraints"], masked)
    for number in range(kinds):
        count = masked // kinds + (number < masked % kinds)
        engine.add(_request(f"masked {number}", count, model, endless_list(number)))
    for _ in range(4):  # the pipeline fills, and every sequence has forked
        engine.step_overlapped()
    matchers, latencies = engine.scheduler.table.matchers, engine.scheduler.latencies
    started = time.perf_counter()
    before = matchers.num_masks, matchers.seconds, latencies.num_sampled
    while engine.has_work and time.perf_counter() - started < config.seconds:
        engine.step_overlapped()
    taken = time.perf_counter() - started
    masks, seconds = matchers.num_masks - before[0], matchers.seconds - before[1]
    sampled = latencies.num_sampled - before[2]
    for request_id in engine.scheduler.request_ids():
        engine.abort(request_id)
    engine.settle()
    return {
        "free_per_s": (sampled - masks) / taken,
        "masked_per_s": masks / taken,
        "mask_us": 1e6 * seconds / max(masks, 1),
    }


def endless_list(number: int) -> str:
    """Return a constraint, another one for each number, that no completion comes to the end of."""
    item = {
        "type": "object",
        "properties": {
            f"name_{number}": {"type": "string", "maxLength": 20},
            "count": {"type": "integer", "minimum": 0, "maximum": 10_000},
            "kind": {"enum": ["one", "other", "none"]},
        },
        "required": [f"name_{number}", "count", "kind"],
    }
    return json_constraint({"type": "array", "items": item, "minItems": 10_000}, strict=True)


def _request(name: str, n: int, model: ModelConfig, constraint: str) -> Request:
    params = SamplingParams(
        n=n, max_tokens=model.n_ctx, ignore_eos=not constraint, constraint=constraint
    )
    return Request(name, np.zeros(1, "<i4").tobytes(), params)


def markdown(record: Record) -> list[str]:
    """Render the record as a table."""
    rows = record["settings"]["rows"]
    lines = []
    for model in record["models"]:
        for own in model["runs"]:
            plain = own["cases"][0]["free_per_s"]
            for case in own["cases"]:
                together = case["free_per_s"] + case["masked_per_s"]
                lines.append(
                    f"{model['name']} | {own['dtype']} | {case['share']:.0%} | "
                    f"{case['constraints']} | {case['free_per_s']:,.0f} | "
                    f"{case['masked_per_s']:,.0f} | {together / plain:.3f} | "
                    f"{case['mask_us']:.1f} µs"
                )
    return [
        f"{rows:,} rows, some of them under constraints that allow lists of objects; masks are "
        "made on the host. Tokens a second are medians of turns; raw numbers are in the JSON file.",
        "",
        *table(
            "model | dtype | constrained rows | constraints | free tok/s | constrained tok/s | "
            "all, of those without constraints | a mask",
            lines,
        ),
    ]
