"""What this machine can do at best: matrix products, timed in the run that they judge.

Ours, MAX's, numpy's, and oneDNN's and PyTorch's if torch is there. The best of a dtype is its peak,
so a figure is never flattered by our own product being slow.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import msgspec
import numpy as np
from max.driver import CPU, Buffer
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, Module, TensorType, ops

from engine.batch import F32
from engine.bench.torch_side import ask_torch, has_torch
from engine.linear import KERNELS, U16, linear, linear_shape, pack_linear, round_bfloat16

ROWS = (256, 1024, 2048)
SHAPES = ((512, 2048), (1024, 4096))
KINDS = {
    "srm": (DType.float32, "srm_linear"),
    "srm_bfloat16": (DType.bfloat16, "srm_linear"),
    "max": (DType.float32, "MAX matmul"),  # which has no fast bfloat16 on a CPU
}
"""Graphs, and what a record calls them."""

Product = tuple[str, str, Callable[[], object]]  # by whom, dtype, one call


class GemmPeak:
    """The products, compiled once and measured as often as wanted."""

    def __init__(self) -> None:
        session, module = InferenceSession(devices=[CPU()]), Module()
        for inner, columns in SHAPES:
            for name, (dtype, _) in KINDS.items():
                graph = _add_graph(module, name, inner, columns, dtype)
        compiled = session.compile(module, custom_extensions=graph.kernel_libraries_paths)
        self._models = session.init_all(compiled)

    def measure(self, repetitions: int) -> list[dict[str, Any]]:
        """A list of {by, dtype, shape [rows, inner, columns], gflops}."""
        found = []
        for shape in SHAPES:
            for rows in ROWS:
                for name, dtype, run in self._products(rows, *shape):
                    flops = 2 * rows * math.prod(shape)
                    found.append(
                        {
                            "by": name,
                            "dtype": dtype,
                            "shape": [rows, *shape],
                            "gflops": flops / _seconds(run, repetitions) / 1e9,
                        }
                    )
        if has_torch():
            found += msgspec.json.decode(ask_torch("gemm_peak", str(repetitions)))
        return found

    def _products(self, rows: int, inner: int, columns: int) -> Iterator[Product]:
        weight = np.random.default_rng(0).standard_normal((inner, columns), np.float32)
        x = np.random.default_rng(1).standard_normal((rows, inner), np.float32)
        for name, (dtype, by) in KINDS.items():
            fed = round_bfloat16(x) if dtype == DType.bfloat16 else x
            packed = weight if by == "MAX matmul" else pack_linear(weight, dtype)
            buffers = [_buffer(fed, dtype), _buffer(packed, dtype)]
            model = self._models[_graph_name(name, inner, columns)]
            yield by, dtype.name, partial(model.execute, *buffers)
        yield "numpy", "float32", partial(np.matmul, x, weight)


def peaks(products: list[dict[str, Any]]) -> dict[str, float]:
    """The best GFLOP/s by dtype."""
    dtypes = {entry["dtype"] for entry in products}
    return {
        dtype: max(entry["gflops"] for entry in products if entry["dtype"] == dtype)
        for dtype in sorted(dtypes, reverse=True)
    }


def peak_line(record: dict[str, Any]) -> str:
    """The peaks of a record as a sentence."""
    named = (f"{dtype} {peak:,.0f} GFLOP/s" for dtype, peak in record["peak_gflops"].items())
    return f"GEMM peaks of this run: {', '.join(named)}."


def rate_cells(record: dict[str, Any], dtype: str, tokens_per_s: float, flops: int) -> str:
    """Tokens a second, GFLOP/s and the fraction of the dtype's peak as cells of a table."""
    gflops = tokens_per_s * flops / 1e9
    return f"{tokens_per_s:,.0f} | {gflops:,.0f} | {share(record, dtype, tokens_per_s, flops)}"


def share(record: dict[str, Any], dtype: str, tokens_per_s: float, flops: int) -> str:
    """The fraction of the dtype's peak; "–" where torch alone would have measured it."""
    peak = record["peak_gflops"].get(dtype)
    return "–" if peak is None else f"{tokens_per_s * flops / 1e9 / peak:.0%}"


def gemm_table(record: dict[str, Any]) -> list[str]:
    """The products of a record, before and after what they judge, as lines of Markdown."""
    lines = ["| GEMM by | dtype | shape | GFLOP/s before | after |", "|---|---|---|---|---|"]
    for before, after in zip(record["gemm_before"], record["gemm_after"], strict=True):
        shape = "×".join(map(str, before["shape"]))
        lines.append(
            f"| {before['by']} | {before['dtype']} | {shape} "
            f"| {before['gflops']:.0f} | {after['gflops']:.0f} |"
        )
    return lines


def _graph_name(name: str, inner: int, columns: int) -> str:
    return f"{name}_{inner}_{columns}"


def _add_graph(module: Module, name: str, inner: int, columns: int, dtype: DType) -> Graph:
    on, is_ours = DeviceRef.CPU(), name.startswith("srm")
    shape = linear_shape(inner, columns, on, dtype) if is_ours else (inner, columns)
    with Graph(
        _graph_name(name, inner, columns),
        input_types=[TensorType(dtype, ["rows", inner], on), TensorType(dtype, shape, on)],
        custom_extensions=[KERNELS],
        module=module,
    ) as graph:
        x, weight = (value.tensor for value in graph.inputs)
        graph.output(linear(x, weight, columns) if is_ours else ops.matmul(x, weight))
    return graph


def _buffer(array: F32 | U16, dtype: DType) -> Buffer:
    return Buffer.from_numpy(array).view(dtype, array.shape)  # numpy has no bfloat16, only its bits


def _seconds(run: Callable[[], object], repetitions: int) -> float:
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
