"""A device's peak rate of matrix products, measured in the run that it is compared with.

On a CPU it times ours, MAX's, numpy's, and oneDNN's and PyTorch's if torch is installed; on a GPU
PyTorch's alone, which are cuBLAS's. The best of a dtype is its peak, so no figure looks better
because our own product is slow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from max.driver import Buffer
from max.dtype import DType
from max.engine import InferenceSession, Model
from max.graph import DeviceRef, Graph, Module, TensorType, ops

from research.bench.peaks.timing import seconds_per_call
from research.bench.peaks.torch_side import has_torch, torch_products
from srm.engine.config import Dtype
from srm.engine.device.graph_cache import Built, GraphCache
from srm.engine.device.linear import (
    kernel_libraries,
    linear,
    linear_shape,
    pack_linear,
    round_bfloat16,
)
from srm.engine.device.runner import open_device

ROWS = {"cpu": (64, 256, 1024, 2048), "gpu": (2_048, 16_384, 65_536)}
SHAPES = ((512, 2048), (1024, 4096))
LEAST_S = 0.2
"""Least seconds of a repetition."""
KINDS = {
    "srm": (DType.float32, "srm_linear"),
    "srm_bfloat16": (DType.bfloat16, "srm_linear"),
    "max": (DType.float32, "MAX matmul"),  # which has no fast bfloat16 on a CPU
}
"""Graphs of a CPU: dtype, and the name in a record."""

Product = tuple[str, str, Callable[[], object]]  # by whom, dtype, one call


class GemmPeak:
    """The products on a "cpu" or "gpu", compiled once and measured as often as wanted."""

    def __init__(self, kind: str, cache_dir: Path, dtypes: tuple[Dtype, ...]) -> None:
        self._kind = kind
        self._dtypes = tuple(dtype for dtype in dtypes if dtype != "float8")  # of our ops alone
        self._models = _load_models(cache_dir.expanduser()) if kind == "cpu" else {}

    def measure(self, repetitions: int) -> list[dict[str, Any]]:
        """Return a list of {by, dtype, shape [rows, inner, columns], gflops}."""
        results = []
        for shape in SHAPES if self._models else ():
            for rows in ROWS["cpu"]:
                for name, dtype, run in self._products(rows, *shape):
                    raw = seconds_per_call(run, lambda: None, repetitions, LEAST_S)
                    gflops = 2 * rows * math.prod(shape) / median(raw) / 1e9
                    entry = {"by": name, "dtype": dtype, "shape": [rows, *shape], "gflops": gflops}
                    results.append(entry)
        if has_torch(self._kind) and self._dtypes:
            rows_tried, dtypes = ROWS[self._kind], self._dtypes
            results += torch_products(self._kind, dtypes, rows_tried, SHAPES, repetitions)
        return results

    def _products(self, rows: int, inner: int, columns: int) -> Iterator[Product]:
        weight = np.random.default_rng(0).standard_normal((inner, columns), np.float32)
        x = np.random.default_rng(1).standard_normal((rows, inner), np.float32)
        for name, (dtype, by) in KINDS.items():
            if dtype.name not in self._dtypes:
                continue
            laid_out = weight if by == "MAX matmul" else pack_linear(weight, dtype)
            fed = round_bfloat16(x) if dtype == DType.bfloat16 else x
            # numpy has no bfloat16, only its bits
            buffers = [Buffer.from_numpy(each).view(dtype, each.shape) for each in (fed, laid_out)]
            model = self._models[_graph_name(name, inner, columns)]
            yield by, dtype.name, partial(model.execute, *buffers)
        if "float32" in self._dtypes:
            yield "numpy", "float32", partial(np.matmul, x, weight)


def _load_models(folder: Path) -> dict[str, Model]:
    """Return every graph of KINDS in every shape, from `folder` if they are cached there."""
    device = open_device("cpu")
    session, on = InferenceSession(devices=[device]), DeviceRef.from_device(device)

    def build() -> Built:
        module = Module()
        for inner, columns in SHAPES:
            for name, (dtype, _) in KINDS.items():
                _add_graph(module, name, inner, columns, dtype, on)
        return module, kernel_libraries()

    compiled = GraphCache(session, device, folder).load("gemm", (SHAPES, *KINDS), build)
    models: dict[str, Model] = session.init_all(compiled)
    return models


def _graph_name(name: str, inner: int, columns: int) -> str:
    return f"{name}_{inner}_{columns}"


def _add_graph(
    module: Module, name: str, inner: int, columns: int, dtype: DType, on: DeviceRef
) -> None:
    is_ours = not name.startswith("max")
    shape = linear_shape(inner, columns, on, dtype) if is_ours else (inner, columns)
    with Graph(
        _graph_name(name, inner, columns),
        input_types=[TensorType(dtype, ["rows", inner], on), TensorType(dtype, shape, on)],
        custom_extensions=kernel_libraries(),
        module=module,
    ) as graph:
        x, weight = (value.tensor for value in graph.inputs)
        graph.output(linear(x, weight, columns) if is_ours else ops.matmul(x, weight))
