"""`srm bench kernels`: every op alone by rows, against the limit that binds it.

Each op is a graph of its own at the shapes of the models. Its time is that of a call through MAX;
its least operations and bytes are counted in `research/bench/engine/counts.py`. The limit is the
longer of
two times: its operations at the dtype's GEMM peak, its bytes at the memory's peak, both measured in
the same run.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from research.bench.engine.counts import PROMPT, count_op
from research.bench.engine.models import BenchConfig, measure_models
from research.bench.engine.ops import Ops, Variant
from research.bench.frame import Record, note, run, table
from research.bench.peaks.rates import limit, peak_line, peak_tables, runs_of
from research.bench.peaks.timing import seconds_per_call
from srm.engine.config import Dtype, ModelConfig
from srm.engine.device.linear import graph_dtype
from srm.engine.device.products import choose_product, choose_variants
from srm.engine.device.runner import open_device

NAMES = {
    "mix_prompts": f"mix, prompts of {PROMPT}",
    "sample_top_p": "sample, top-p 0.9",
    "sample_slices": "sample, from slices",
    "proj_in": "proj in",
    "proj_out": "proj out",
}
"""Names of ops in tables, where they differ from the identifier."""


class KernelsBenchConfig(BenchConfig, frozen=True, forbid_unknown_fields=True):
    """Settings of `srm bench kernels`."""

    rows: tuple[int, ...] = (1, 64, 1024, 4096)
    """Rows of a call; for ops that mix prompts, their tokens."""


def main(argv: list[str]) -> int:
    """Measure, write a record and its plot, print its tables."""
    return run(KernelsBenchConfig, argv, "kernels", measure, markdown)


def measure(config: KernelsBenchConfig) -> Record:
    """Return every op of each model, and the peaks."""
    return measure_models(config, lambda path: _measure_model(path, config))


def _measure_model(path: Path, config: KernelsBenchConfig) -> dict[str, Any]:
    model = msgspec.json.decode((path / "config.json").read_bytes(), type=ModelConfig)
    return {
        "config": msgspec.to_builtins(model),
        "runs": [_measure_dtype(model, dtype, config) for dtype in config.dtypes],
    }


def _measure_dtype(model: ModelConfig, dtype: Dtype, config: KernelsBenchConfig) -> dict[str, Any]:
    device = open_device(config.device)
    stored = graph_dtype(dtype)
    product = choose_product(config.product, model, stored, device)
    variants = choose_variants(config.variants, product, model, stored)
    variant = Variant(model, stored, product, not device.is_host, variants)
    ops = Ops(variant, device, config.cache_dir.expanduser())

    def timed(name: str, rows: int) -> dict[str, Any]:
        call = ops.prepare(name, rows)
        raw = seconds_per_call(call, device.synchronize, config.repetitions, config.seconds)
        return {"seconds": median(raw), "raw": raw}

    results = []
    for name in ops.ops:
        for rows in config.rows if name != "call" else ():
            count = count_op(name, model, dtype, config.device, rows)
            results.append(note({"op": name, "rows": rows} | count._asdict() | timed(name, rows)))
    call = timed("call", 1) if "call" in ops.ops else None  # there is none of float8
    return {"dtype": dtype, "call": call, "ops": results}


def markdown(record: Record) -> list[str]:
    """Render the record as tables."""
    runs = runs_of(record)
    empty = ", ".join(
        f"{run['call']['seconds'] * 1e6:.0f} µs ({model['name']}, {run['dtype']})"
        for model, run in runs
        if run["call"]
    )
    empty = empty or "a time that was not measured"
    return [
        f"{peak_line(record)} Times are medians of calls through MAX, of which one that does "
        f"nothing takes {empty}; weights come from memory, as another layer's would. Operations "
        "and bytes are counted (`bench/engine/counts.py`). The *limit* is the peak that allows "
        "fewer calls a second; above 100 % what is counted as moved stays in a cache.",
        "",
        *table(
            "model | dtype | op | rows | time | MFLOP | MB | GFLOP/s | GB/s | limit | of the limit",
            (_row(record, model, run, entry) for model, run in runs for entry in run["ops"]),
        ),
        "",
        *peak_tables(record),
    ]


def _row(record: Record, model: Record, run: Record, entry: Record) -> str:
    flops, moved, seconds = entry["flops"], entry["bytes"], entry["seconds"]
    name, least = limit(record, run["dtype"], flops, moved)
    op = NAMES.get(entry["op"], entry["op"])
    return (
        f"{model['name']} | {run['dtype']} | {op} | {entry['rows']:,} | {seconds * 1e6:,.0f} µs "
        f"| {flops / 1e6:,.2f} | {moved / 1e6:,.2f} | {flops / seconds / 1e9:,.1f} "
        f"| {moved / seconds / 1e9:,.1f} | {name} | {least / seconds:.0%}"
    )
