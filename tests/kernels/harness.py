"""Runs single ops of `engine.device.kernels` on numpy arrays, on a CPU or a GPU.

Each op is a graph of its own with every dimension symbolic. All graphs form one module, because
MAX's compile time hardly depends on how many there are.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from max.driver import Buffer, Device
from max.dtype import DType
from max.engine import CompiledModel, InferenceSession
from max.graph import BufferType, DeviceRef, Graph, Module, TensorType, TensorValue

from engine.device import kernels
from engine.device.graph_cache import cached
from engine.device.linear import PANEL, kernel_libraries, layer_norm, linear

Array = npt.NDArray[Any]
Inputs = list[BufferType | TensorType]

HOST = DeviceRef.CPU()
I32, U64, F32, BF16 = DType.int32, DType.uint64, DType.float32, DType.bfloat16
KINDS = {"float32": F32, "bfloat16": BF16, "widened": BF16}
"""How products keep and multiply: the third as a processor does that has none of bfloat16."""
EPILOGUES = {
    "up": (True, True, False),
    "down": (True, False, True),
    "proj_in": (True, False, False),
    "head": (False, False, False),
}
"""What the model does: (has bias, has SiLU, has residual)."""
PRODUCTS = [f"{kind}.{name}" for kind in ("float32", "bfloat16") for name in EPILOGUES]
PRODUCTS += ["widened.down", "widened.head"]
MUTATED_TENSORS = {("edit", 1), ("edit_bfloat16", 1)}
"""Inputs that an op changes in place though they are no buffers: op and place."""


def widened(bits: Array) -> npt.NDArray[np.float32]:
    """The float32 that bits of bfloat16 mean."""
    wide = bits.astype(np.uint32) << 16
    return wide.view(np.float32)


def untouched(shape: tuple[int, ...], dtype: type[np.float32 | np.int32]) -> Array:
    """Zeros that may be larger than the memory: only pages that are touched take any."""
    size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
    return np.frombuffer(mmap.mmap(-1, size, flags=flags), dtype).reshape(shape)


def compile_ops(session: InferenceSession, device: Device, folder: Path) -> CompiledModel:
    """The graphs of `Ops`, from `folder` where they are there: a GPU machine may have no compiler.

    PRODUCTS and "layer_norm" of either dtype are for a CPU alone. "mix" is there plain, with gamma
    ("mix_gamma"), with SiLU ("mix_silu"), and with both and a residual ("mix_all"), whose inputs
    come in this order after those of "mix".
    """
    inputs = _inputs(DeviceRef.from_device(device))

    def compile_graphs() -> CompiledModel:
        module = Module()
        libraries: list[Path] = []
        for name, op in _ops(device.is_host).items():
            libraries = _add_graph(module, name, op, inputs[name])
        return session.compile(module, custom_extensions=libraries)

    return cached("ops", (Path(__file__).read_bytes(),), compile_graphs, device, folder)


def _ops(is_host: bool) -> dict[str, Callable[..., Any]]:
    ops: dict[str, Callable[..., Any]] = {
        "embed": kernels.embed,
        "mix": kernels.mix,
        "mix_gamma": kernels.mix,
        "mix_silu": partial(kernels.mix, silu=True),
        "mix_all": partial(kernels.mix, silu=True),
        "taps": kernels.taps,
        "edit": kernels.edit,
        "edit_bfloat16": kernels.edit,
        "sample": kernels.sample,
        "score": kernels.score,
    }
    if is_host:
        ops |= {name: partial(_product, name) for name in PRODUCTS}
        ops |= dict.fromkeys(["float32.layer_norm", "bfloat16.layer_norm"], layer_norm)
    return ops


def _product(
    name: str, x: TensorValue, weight: TensorValue, bias: TensorValue, residual: TensorValue
) -> TensorValue:
    """Inputs that are not used give dimensions a value. Logits, of "head", are float32."""
    kind, _, epilogue = name.partition(".")
    has_bias, silu, has_residual = EPILOGUES[epilogue]
    return linear(
        x,
        weight,
        "columns",
        bias=bias if has_bias else None,
        silu=silu,
        residual=residual if has_residual else None,
        rows="rows",
        out_dtype=F32 if epilogue == "head" else KINDS[kind],
        widen=kind == "widened",
    )


class Ops:
    """The ops of `engine.device.kernels` on a device; `compile_ops` names them."""

    def __init__(self, device: Device, folder: Path) -> None:
        self._device = device
        self._inputs = _inputs(DeviceRef.from_device(device))
        session = InferenceSession(devices=[device])
        self._models = session.init_all(compile_ops(session, device, folder))

    def run(self, name: str, *arrays: Array) -> list[Array]:
        """Run an op on its inputs in order. Arrays that the op mutates are mutated."""
        inputs = self._inputs[name]
        buffers = []
        for array, kind in zip(arrays, inputs, strict=True):
            assert array.dtype == _numpy_dtype(kind.dtype), (array.dtype, kind)
            buffer = Buffer.from_numpy(array)  # shares the array's memory
            buffers.append(buffer if kind.device == HOST else buffer.to(self._device))
        views = [
            buffer.view(kind.dtype, array.shape)
            for array, kind, buffer in zip(arrays, inputs, buffers, strict=True)
        ]
        outputs = [_to_numpy(output) for output in self._models[name].execute(*views)]
        for place, (array, kind) in enumerate(zip(arrays, inputs, strict=True)):
            is_mutated = isinstance(kind, BufferType) or (name, place) in MUTATED_TENSORS
            if is_mutated and kind.device != HOST:
                array[...] = buffers[place].to_numpy()
        return outputs


def _numpy_dtype(dtype: DType) -> np.dtype[Any]:
    """Numpy has no bfloat16, only its bits."""
    return np.dtype(np.uint16) if dtype == BF16 else dtype.to_numpy()


def _to_numpy(buffer: Buffer) -> Array:
    bits = buffer.view(DType.uint16, buffer.shape) if buffer.dtype == BF16 else buffer
    found: Array = bits.to_numpy()
    return found


def _inputs(on: DeviceRef) -> dict[str, Inputs]:
    rows = TensorType(I32, ["rows"], on)
    last_token = BufferType(I32, ["slots"], on)
    x = TensorType(F32, ["tokens", "width"], on)
    per_position = TensorType(F32, ["heads", "n_ctx"], on)
    mix: Inputs = [
        BufferType(F32, ["slots", "pool_width"], on),
        TensorType(I32, [], HOST),
        x,
        *(rows, rows, rows),
        TensorType(I32, ["bounds"], on),
        *(per_position, per_position, per_position),
        TensorType(F32, [2, "heads"], on),
    ]
    products = {name: _product_inputs(on, KINDS[name.partition(".")[0]]) for name in PRODUCTS}
    norms: dict[str, Inputs] = {}
    for kind in ("float32", "bfloat16"):
        row = TensorType(KINDS[kind], ["width"], on)
        norms[f"{kind}.layer_norm"] = [TensorType(KINDS[kind], ["tokens", "width"], on), row, row]
    return {
        **products,
        **norms,
        "embed": [
            last_token,
            TensorType(I32, ["tokens"], on),
            rows,
            TensorType(F32, ["vocab", "width"], on),
        ],
        "mix": mix,
        "mix_gamma": [*mix, per_position],
        "mix_silu": mix,
        "mix_all": [*mix, per_position, x],
        "taps": [
            x,
            rows,
            TensorType(I32, ["bounds"], on),
            TensorType(F32, ["kernel_size", "n_ctx"], on),
            TensorType(F32, ["n_ctx"], on),
            x,
        ],
        "edit": _edit_inputs(on, F32),
        "edit_bfloat16": _edit_inputs(on, BF16),
        "sample": [
            last_token,
            TensorType(F32, ["head", "vocab"], on),
            *(TensorType(dtype, ["decode"], on) for dtype in (F32, I32, F32, F32, U64)),
            *(rows, rows),
        ],
        "score": [
            TensorType(F32, ["head", "vocab"], on),
            TensorType(F32, ["decode"], on),
            *(TensorType(I32, [dim], on) for dim in ("decode", "head", "scored", "scored")),
        ],
    }


def _product_inputs(on: DeviceRef, dtype: DType) -> Inputs:
    return [
        TensorType(dtype, ["tokens", "depth"], on),
        TensorType(dtype, ["panels", "words", PANEL, 4 // dtype.size_in_bytes], on),
        TensorType(dtype, ["columns"], on),
        TensorType(dtype, ["rows", "columns"], on),
    ]


def _edit_inputs(on: DeviceRef, dtype: DType) -> Inputs:
    return [
        BufferType(I32, ["slots"], on),
        TensorType(dtype, ["head", "vocab"], on),
        *(TensorType(I32, [dim], on) for dim in ("tokens", "rows", "edited")),
        TensorType(I32, ["edited", "span_bounds"], on),
        TensorType(F32, ["edited", "penalties"], on),
        TensorType(I32, ["edit_tokens"], on),
        TensorType(F32, ["biases"], on),
    ]


def _add_graph(
    module: Module,
    name: str,
    op: Callable[..., TensorValue | tuple[TensorValue, ...] | None],
    inputs: Inputs,
) -> list[Path]:
    """Returns the compiled Mojo packages that the graph needs."""
    with Graph(
        name, input_types=inputs, custom_extensions=kernel_libraries(), module=module
    ) as graph:
        values = (
            value.buffer if isinstance(kind, BufferType) else value.tensor
            for value, kind in zip(graph.inputs, inputs, strict=True)
        )
        outputs = op(*values)
        if outputs is None:
            graph.output()
        else:
            graph.output(*(outputs if isinstance(outputs, tuple) else (outputs,)))
    libraries: list[Path] = graph.kernel_libraries_paths
    return libraries
