"""`srm bench constrained`: what constraints cost, by the part of the rows that have one.

Rows under a constraint write a list of objects that does not end so soon, rows without one any
text. Each case is measured with tables on the device and with masks of the host, which `min_tokens`
asks for. All cases take turns, so that other load on the machine affects all alike.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np
from msgspec.structs import replace

from research.bench.engine.decode import settings_for
from research.bench.engine.models import BenchConfig, measure_each
from research.bench.frame import Record, run, table
from srm.engine.config import DEMO_MODEL, Dtype, ModelConfig
from srm.engine.constraints.constraint import json_constraint
from srm.engine.constraints.grammars import Grammar, Grammars
from srm.engine.device.libc import keep_freed_memory
from srm.engine.device.runner import ModelRunner
from srm.engine.messages import Request, SamplingParams
from srm.engine.process.engine import Engine
from srm.engine.weights.checkpoint import load_checkpoint

SHARES = (0.0, 0.05, 0.5, 1.0)
"""Parts of the rows that have a constraint."""
Way = Literal["table", "masks"]


class ConstrainedBenchConfig(BenchConfig, frozen=True, forbid_unknown_fields=True):
    """Settings of `srm bench constrained`."""

    rows: int = 2_048
    """Sequences that run at once."""
    constraints: tuple[int, ...] = (1, 100, 1_000)
    """Numbers of different constraints that those rows have."""
    ways: tuple[Way, ...] = ("table", "masks")
    """Ways to keep rows to constraints: tables on the device, masks of the host."""


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
    cases: list[dict[str, Any]] = [{"share": 0.0, "constraints": 0, "way": ""}]
    cases += [
        {"share": share, "constraints": count, "way": way}
        for share in SHARES[1:]
        for count in config.constraints
        for way in config.ways
    ]
    for case in cases:
        case["raw"] = []
    started = time.perf_counter()
    grammars = _compile(Grammars(model, path / "tokenizer.json"), max(config.constraints))
    taken = time.perf_counter() - started
    for _ in range(config.repetitions):
        for case in cases:
            settings = replace(settings_for(config, dtype, config.rows), model=path)
            engine = Engine(model, runner, settings)
            _add_requests(engine, model, case, config.rows, grammars)
            case["raw"].append(_rates(engine, case["way"], config.seconds))
    for case in cases:
        for name in ("free_per_s", "constrained_per_s", "core_us", "mask_us"):
            case[name] = median(raw[name] for raw in case["raw"])
    sizes = [grammar.automaton.nbytes for grammar in grammars.values() if grammar.automaton]
    return {
        "dtype": dtype,
        "cases": cases,
        "compile_ms": 1e3 * taken / len(grammars),
        "table_bytes": median(sizes),
    }


def _compile(grammars: Grammars, count: int) -> dict[str, Grammar]:
    """Compile so many constraints."""
    constraints = map(long_list, range(count))
    return {constraint: grammars.build(constraint) for constraint in constraints}


def _add_requests(
    engine: Engine,
    model: ModelConfig,
    case: dict[str, Any],
    rows: int,
    grammars: dict[str, Grammar],
) -> None:
    constrained = round(rows * case["share"])
    if constrained < rows:
        engine.add(_request("free", rows - constrained, model))
    kinds = min(case["constraints"], constrained)
    for number, (constraint, grammar) in enumerate(list(grammars.items())[:kinds]):
        count = constrained // kinds + (number < constrained % kinds)
        engine.grammars.keep(constraint, grammar)
        engine.add(_request(f"{number}", count, model, constraint, case["way"]))


def _rates(engine: Engine, way: str, seconds: float) -> dict[str, float]:
    """Return tokens a second of both kinds of rows, microseconds of all cores a token, which other
    load on the machine changes least, and microseconds of the host a mask."""
    for _ in range(4):  # the pipeline fills, and every sequence has forked
        engine.step_overlapped()
    engine.settle()  # or masks would be counted whose tokens are not
    before, started, worked = _counts(engine, way), time.perf_counter(), time.process_time()
    while engine.has_work and time.perf_counter() - started < seconds:
        engine.step_overlapped()
    engine.settle()
    taken, worked = time.perf_counter() - started, time.process_time() - worked
    sampled, constrained, masking = (
        now - then for now, then in zip(_counts(engine, way), before, strict=True)
    )
    for request_id in engine.scheduler.request_ids():
        engine.abort(request_id)
    engine.settle()
    return {
        "free_per_s": (sampled - constrained) / taken,
        "constrained_per_s": constrained / taken,
        "core_us": 1e6 * worked / max(sampled, 1),
        "mask_us": 1e6 * masking / max(constrained, 1),
    }


def _counts(engine: Engine, way: str) -> tuple[int, int, float]:
    """Count tokens, those of constrained rows, and seconds of making masks, all ever."""
    scheduler = engine.scheduler
    matchers = scheduler.table.matchers
    constrained = scheduler.num_tabled if way == "table" else matchers.num_masks
    return scheduler.latencies.num_sampled, constrained, matchers.seconds


def long_list(number: int) -> str:
    """Return a constraint, another one for each number, whose shortest completion has some 90
    tokens: more than are sampled while a case is measured."""
    item = {
        "type": "object",
        "properties": {
            f"name_{number}": {"type": "string", "maxLength": 8},
            "count": {"type": "integer", "minimum": 0, "maximum": 10_000},
            "kind": {"enum": ["one", "other", "none"]},
        },
        "required": [f"name_{number}", "count", "kind"],
    }
    schema = {"type": "array", "items": item, "minItems": 3, "maxItems": 3}
    return json_constraint(schema, strict=True)


def _request(name: str, n: int, model: ModelConfig, constraint: str = "", way: str = "") -> Request:
    params = SamplingParams(
        n=n,
        max_tokens=model.n_ctx,
        min_tokens=int(way == "masks"),
        ignore_eos=not constraint,
        constraint=constraint,
    )
    return Request(name, np.zeros(1, "<i4").tobytes(), params)


def markdown(record: Record) -> list[str]:
    """Render the record as a table."""
    rows = record["settings"]["rows"]
    lines = []
    for model in record["models"]:
        for own in model["runs"]:
            plain, core_us = (own["cases"][0][name] for name in ("free_per_s", "core_us"))
            for case in own["cases"]:
                together = case["free_per_s"] + case["constrained_per_s"]
                lines.append(
                    f"{model['name']} | {own['dtype']} | {case['share']:.0%} | "
                    f"{case['constraints']} | {case['way']} | {case['free_per_s']:,.0f} | "
                    f"{case['constrained_per_s']:,.0f} | {together / plain:.3f} | "
                    f"{case['core_us']:.0f} µs | {case['core_us'] / core_us:.3f} | "
                    f"{case['mask_us']:.1f} µs"
                )
    return [
        f"{rows:,} rows, some of them under constraints that allow lists of objects, by tables on "
        "the device or by masks of the host. Tokens a second are medians of turns; raw numbers, "
        "bytes of tables and times of compiling are in the JSON file.",
        "",
        *table(
            "model | dtype | constrained rows | constraints | way | free tok/s | "
            "constrained tok/s | all, of those without constraints | cores a token | of those "
            "without constraints | a mask",
            lines,
        ),
    ]
