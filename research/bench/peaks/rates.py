"""Measured figures against the machine's two limits, as cells and tables of Markdown.

The limits are the best matrix product of a dtype and the best stream through memory, both measured
in the same run. Knows the format of a record, in which earlier ones may lack values that were not
measured then ("–"), and no device.
"""

from __future__ import annotations

import math
from statistics import median

from research.bench.frame import Record, table


def peaks(products: list[Record]) -> dict[str, float]:
    """Return the best GFLOP/s by dtype."""
    best: dict[str, float] = {}
    for entry in products:
        best[entry["dtype"]] = max(entry["gflops"], best.get(entry["dtype"], 0.0))
    return dict(sorted(best.items(), reverse=True))


def memory_peak(streams: list[Record]) -> float:
    """Return the best GB/s of all streams."""
    return float(max(entry["gb_per_s"] for entry in streams))


def runs_of(record: Record) -> list[tuple[Record, Record]]:
    """Return every run of a record, behind its model."""
    return [(model, run) for model in record["models"] for run in model["runs"]]


def peak_line(record: Record) -> str:
    """Return the peaks of a record as a sentence."""
    named = [f"{dtype} {peak:,.0f} GFLOP/s" for dtype, peak in record["peak_gflops"].items()]
    if "peak_gb_per_s" in record:
        named.append(f"memory {record['peak_gb_per_s']:.1f} GB/s")
    return f"Peaks of this run: {', '.join(named)}."


def rate_cells(record: Record, dtype: str, tokens_per_s: float, flops: int) -> str:
    """Return tokens a second, GFLOP/s and the fraction of the dtype's peak as cells of a table."""
    gflops = tokens_per_s * flops / 1e9
    return f"{tokens_per_s:,.0f} | {gflops:,.0f} | {share(record, dtype, tokens_per_s, flops)}"


def share(record: Record, dtype: str, tokens_per_s: float, flops: int) -> str:
    """Return the fraction of the dtype's peak; "–" if the run measured none."""
    peak = record["peak_gflops"].get(dtype)
    return "–" if peak is None else f"{tokens_per_s * flops / 1e9 / peak:.0%}"


def bytes_moved(model: Record, dtype: str, rows: int) -> int | None:
    """Return the least bytes of a step of so many rows, if they were counted."""
    counted = model.get("bytes", {}).get(dtype)
    return counted and int(counted["once"] + rows * counted["row"])


def byte_cells(record: Record, moved: int | None, seconds: float) -> str:
    """Return GB/s and the fraction of the memory's peak as cells; "–" if no bytes were counted."""
    peak = record.get("peak_gb_per_s")
    if moved is None or peak is None:
        return "– | –"
    return f"{moved / seconds / 1e9:.1f} | {moved / seconds / 1e9 / peak:.0%}"


def start_cells(run: Record) -> tuple[str, str]:
    """Return the times of a cold and of a warm start; PyTorch's cold one is its first steps."""
    if "startup" not in run:
        return f"{run.get('first_steps_s', 0):.1f} s", "–"
    cold = run["startup"].get("cold_s")
    return f"{cold:.1f} s" if cold else "–", f"{median(run['startup']['warm_s']):.1f} s"


def limit(record: Record, dtype: str, flops: int, moved: int) -> tuple[str, float]:
    """Return the peak that binds so many operations and bytes, and the seconds at that peak.

    A dtype without a measured peak, as float8, is bound by its bytes alone.
    """
    by_flops = flops / record["peak_gflops"].get(dtype, math.inf) / 1e9
    by_bytes = moved / record["peak_gb_per_s"] / 1e9
    return ("GEMM", by_flops) if by_flops > by_bytes else ("memory", by_bytes)


def peak_tables(record: Record) -> list[str]:
    """Render the products and streams of a record, measured before and after, as Markdown."""
    rows = (
        f"{before['by']} | {before['dtype']} | {'×'.join(map(str, before['shape']))} "
        f"| {before['gflops']:.0f} | {after['gflops']:.0f}"
        for before, after in zip(record["gemm_before"], record["gemm_after"], strict=True)
    )
    lines = table("GEMM by | dtype | shape | GFLOP/s before | after", rows)
    return [*lines, "", *memory_table(record)]


def memory_table(record: Record) -> list[str]:
    """Render the streams of a record alone."""
    rows = (
        f"{before['by']} | {before['stream']} | {before['bytes'] / 2**20:,.0f} "
        f"| {before['gb_per_s']:.1f} | {after['gb_per_s']:.1f}"
        for before, after in zip(record["memory_before"], record["memory_after"], strict=True)
    )
    return table("memory by | stream | MiB moved | GB/s before | after", rows)
