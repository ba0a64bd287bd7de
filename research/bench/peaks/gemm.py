"""A device's peak rate of matrix products, measured in the run that it is compared with.

On a CPU it times ours, MAX's, numpy's, and oneDNN's and PyTorch's if torch is installed; on a GPU
PyTorch's and MAX's, whose weights are bound as in a step: as inputs they compile to another kernel.
The best of a dtype is its peak, so no figure looks better because our own product is slow.
`python -m research.bench.peaks.gemm` compiles the graphs ahead, with the settings of
`engine.device.precompile`.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from max.driver import Buffer, Device
from max.dtype import DType
from max.engine import CompiledModel, InferenceSession
from max.graph import DeviceRef, Graph, Module, TensorType, Weight, ops

from research.bench.peaks.timing import seconds_per_call
from research.bench.peaks.torch_side import has_torch, torch_products
from srm.engine.config import Dtype
from srm.engine.device.graph_cache import Built, GraphCache
from srm.engine.device.linear import (
    U16,
    kernel_libraries,
    linear,
    linear_shape,
    pack_linear,
    round_bfloat16,
)
from srm.engine.device.precompile import PrecompileConfig, leave, open_target
from srm.engine.device.runner import open_device
from srm.engine.steps.batch import F32
from srm.settings import load

ROWS = {"cpu": (64, 256, 1024, 2048), "gpu": (2_048, 16_384, 65_536)}
SHAPES = ((512, 2048), (1024, 4096))
LEAST_S = 0.2
"""Least seconds of a repetition."""
KINDS = {
    "cpu": {
        "srm": (DType.float32, "srm_linear"),
        "srm_bfloat16": (DType.bfloat16, "srm_linear"),
        "max": (DType.float32, "MAX matmul"),  # which has no fast bfloat16 on a CPU
    },
    "gpu": {"bound_bfloat16": (DType.bfloat16, "MAX matmul")},
}
"""Graphs by device: dtype, and the name in a record."""

Product = tuple[str, str, Callable[[], object]]  # by whom, dtype, one call


class GemmPeak:
    """The products on a "cpu" or "gpu", compiled once and measured as often as wanted."""

    def __init__(self, kind: str, cache_dir: Path, dtypes: tuple[Dtype, ...]) -> None:
        self._kind, self._device, self._dtypes = kind, open_device(kind), dtypes
        session = InferenceSession(devices=[self._device])
        compiled = compile_gemm(session, self._device, cache_dir.expanduser())
        self._models = session.init_all(compiled, weights_registry=self._bound())

    def _bound(self) -> dict[str, Buffer]:
        """Return the weights of a GPU's graphs, which lie on the host until they are bound."""
        if self._device.is_host:
            return {}
        entries = {}
        for shape in SHAPES:
            drawn = np.random.default_rng(0).standard_normal(shape[::-1], np.float32)
            weight = round_bfloat16(drawn)
            name = _graph_name("bound_bfloat16", *shape)
            entries[name] = Buffer.from_numpy(weight).view(DType.bfloat16, weight.shape)
        return entries

    def measure(self, repetitions: int) -> list[dict[str, Any]]:
        """Return a list of {by, dtype, shape [rows, inner, columns], gflops}."""
        results = []
        for shape in SHAPES:
            for rows in ROWS[self._kind]:
                for name, dtype, run in self._products(rows, *shape):
                    raw = seconds_per_call(run, self._device.synchronize, repetitions, LEAST_S)
                    gflops = 2 * rows * math.prod(shape) / median(raw) / 1e9
                    entry = {"by": name, "dtype": dtype, "shape": [rows, *shape], "gflops": gflops}
                    results.append(entry)
        if has_torch():
            rows_tried, dtypes = ROWS[self._kind], self._dtypes
            results += torch_products(self._kind, dtypes, rows_tried, SHAPES, repetitions)
        return results

    def _products(self, rows: int, inner: int, columns: int) -> Iterator[Product]:
        weight = np.random.default_rng(0).standard_normal((inner, columns), np.float32)
        x = np.random.default_rng(1).standard_normal((rows, inner), np.float32)
        for name, (dtype, by) in KINDS[self._kind].items():
            if dtype.name not in self._dtypes:
                continue
            is_narrow = dtype == DType.bfloat16
            plain = round_bfloat16(weight) if is_narrow else weight
            laid_out = plain if by == "MAX matmul" else pack_linear(weight, dtype)
            fed = round_bfloat16(x) if is_narrow else x
            given = [fed, laid_out] if self._device.is_host else [fed]
            buffers = [self._upload(array, dtype) for array in given]
            model = self._models[_graph_name(name, inner, columns)]
            yield by, dtype.name, partial(model.execute, *buffers)
        if self._device.is_host and "float32" in self._dtypes:
            yield "numpy", "float32", partial(np.matmul, x, weight)

    def _upload(self, array: F32 | U16, dtype: DType) -> Buffer:
        buffer = Buffer.from_numpy(array).to(self._device)
        return buffer.view(dtype, array.shape)  # numpy has no bfloat16, only its bits


def compile_gemm(session: InferenceSession, device: Device, folder: Path) -> CompiledModel:
    """Return every graph of KINDS in every shape, from `folder` if they are cached there."""
    on = DeviceRef.from_device(device)
    kinds = KINDS["cpu" if device.is_host else "gpu"]

    def build() -> Built:
        module = Module()
        for inner, columns in SHAPES:
            for name, (dtype, _) in kinds.items():
                graph = _add_graph(module, name, inner, columns, dtype, on)
        return module, graph.kernel_libraries_paths

    return GraphCache(session, device, folder).load("gemm", (SHAPES, *kinds), build)


def _graph_name(name: str, inner: int, columns: int) -> str:
    return f"{name}_{inner}_{columns}"


def _add_graph(
    module: Module, name: str, inner: int, columns: int, dtype: DType, on: DeviceRef
) -> Graph:
    is_ours, is_bound = not name.startswith("max"), on.is_gpu()
    shape = linear_shape(inner, columns, on, dtype) if is_ours else (inner, columns)
    name = _graph_name(name, inner, columns)
    types = [TensorType(dtype, ["rows", inner], on), TensorType(dtype, shape, on)]
    with Graph(
        name,
        input_types=types[:1] if is_bound else types,
        custom_extensions=kernel_libraries(),
        module=module,
    ) as graph:
        x = graph.inputs[0].tensor
        weight = Weight(name, dtype, shape, on) if is_bound else graph.inputs[1].tensor
        if is_bound:
            weight = ops.transpose(weight, 0, 1)
        by_max = is_bound or not is_ours
        graph.output(ops.matmul(x, weight) if by_max else linear(x, weight, columns))
    return graph


def main(argv: list[str]) -> int:
    """Compile the graphs ahead."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    config = load(PrecompileConfig, argv, prog="python -m research.bench.peaks.gemm")
    device = open_target(config)
    compile_gemm(InferenceSession(devices=[device]), device, config.output)
    return 0


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
