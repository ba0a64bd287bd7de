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
from max.graph import BufferType, BufferValue, DeviceRef, Graph, Module, TensorType, TensorValue

from srm.engine.device import kernels
from srm.engine.device.graph_cache import Built, GraphCache
from srm.engine.device.linear import PANEL, kernel_libraries, layer_norm, linear

Array = npt.NDArray[Any]
Inputs = list[BufferType | TensorType]

HOST = DeviceRef.CPU()
I32, F32, BF16, F16 = DType.int32, DType.float32, DType.bfloat16, DType.float16
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
READERS = ("edit", "constrain", "sample", "reject", "score")
"""Ops that read logits."""
PADDING = 10
"""Columns behind those of tokens, where an op's name ends in "_padded"."""


def widened(bits: Array) -> npt.NDArray[np.float32]:
    """The float32 that bits of bfloat16 mean."""
    wide = bits.astype(np.uint32) << 16
    return wide.view(np.float32)


def untouched(shape: tuple[int, ...], dtype: type[np.float32 | np.int32]) -> Array:
    """Zeros that may be larger than the memory: only pages that are touched take any."""
    size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
    return np.frombuffer(mmap.mmap(-1, size, flags=flags), dtype).reshape(shape)


def odd_rows(vocab: int) -> npt.NDArray[np.float32]:
    """Rows of logits at the limits of what they may be; the first five are no distribution."""
    largest = np.finfo(np.float32).max
    rows = np.random.default_rng(0).normal(0, 2, (10, vocab)).astype(np.float32)
    rows[0, 0] = np.nan
    rows[1, -1] = -np.float32(np.nan)
    rows[2, vocab // 2] = np.inf
    rows[3], rows[4] = -np.inf, np.nan
    rows[5, : vocab - 1] = -np.inf
    rows[6], rows[6, vocab // 2] = -largest, -1e38
    rows[7, :7], rows[7, 7:] = largest, -largest
    rows[8] = 1e-40  # denormal: as good as 0
    rows[9, vocab // 3], rows[9, vocab // 2] = 60, 60
    return rows


def compile_ops(session: InferenceSession, device: Device, folder: Path) -> CompiledModel:
    """The graphs of `Ops`, from `folder` where they are there: a GPU machine may have no compiler.

    PRODUCTS, "layer_norm" of either dtype and "mix_float16" are for a CPU alone. "mix" is there
    plain, with gamma ("mix_gamma"), with SiLU ("mix_silu"), and with both and a residual
    ("mix_all"), whose inputs come in this order after those of "mix". Those named "_padded" take
    logits with PADDING columns behind those of tokens.
    """

    def build() -> Built:
        module = Module()
        for name, (op, inputs) in _ops(DeviceRef.from_device(device)).items():
            libraries = _add_graph(module, name, op, inputs)
        return module, libraries

    shape = (Path(__file__).read_bytes(),)
    return GraphCache(session, device, folder).load("ops", shape, build)


class Ops:
    """The ops of `engine.device.kernels` on a device; `compile_ops` names them."""

    def __init__(self, device: Device, folder: Path) -> None:
        self._device = device
        self._ops = _ops(DeviceRef.from_device(device))
        session = InferenceSession(devices=[device])
        self._models = session.init_all(compile_ops(session, device, folder))

    def run(self, name: str, *arrays: Array) -> list[Array]:
        """Run an op on its inputs in order. Arrays that the op mutates are mutated."""
        inputs = self._ops[name][1]
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
        if not self._device.is_host:
            for array, buffer in zip(arrays, buffers, strict=True):
                array[...] = buffer.to_numpy()
        return outputs


def _numpy_dtype(dtype: DType) -> np.dtype[Any]:
    """Numpy has no bfloat16, only its bits."""
    return np.dtype(np.uint16) if dtype == BF16 else dtype.to_numpy()


def _to_numpy(buffer: Buffer) -> Array:
    bits = buffer.view(DType.uint16, buffer.shape) if buffer.dtype == BF16 else buffer
    array: Array = bits.to_numpy()
    return array


def _ops(on: DeviceRef) -> dict[str, tuple[Callable[..., Any], Inputs]]:
    """Each op by name, and its inputs."""

    def make_type(dtype: DType, *dims: str | int) -> TensorType:
        return TensorType(dtype, dims, on)

    def mix(dtype: DType = F32) -> Inputs:
        pool, unit = BufferType(dtype, ["slots", "pool_width"], on), TensorType(I32, [], HOST)
        scalars = per_position, per_position, per_position, make_type(F32, 2, "heads")
        return [pool, unit, make_type(dtype, "tokens", "width"), rows, rows, rows, bounds, *scalars]

    def edit(dtype: DType) -> Inputs:
        ids = (make_type(I32, dim) for dim in ("tokens", "rows", "edited"))
        spans = make_type(I32, "edited", "span_bounds")
        penalties = make_type(F32, "edited", "penalties")
        lists = make_type(I32, "edit_tokens"), make_type(F32, "biases"), make_type(I32, "masks")
        return [last_token, make_type(dtype, "head", "vocab"), *ids, spans, penalties, *lists]

    def constrain(dtype: DType) -> Inputs:
        rows, tables = make_type(I32, "decode"), make_type(DType.uint16, "table_entries")
        return [last_token, sampling, make_type(dtype, "head", "vocab"), rows, rows, tables]

    def product(dtype: DType) -> Inputs:
        weight = make_type(dtype, "panels", "words", PANEL, 4 // dtype.size_in_bytes)
        added = make_type(dtype, "columns"), make_type(dtype, "rows", "columns")
        return [make_type(dtype, "tokens", "depth"), weight, *added]

    rows, bounds = make_type(I32, "rows"), make_type(I32, "bounds")
    last_token = BufferType(I32, ["slots"], on)
    x, per_position = make_type(F32, "tokens", "width"), make_type(F32, "heads", "n_ctx")
    logits = make_type(F32, "head", "vocab")
    taps = make_type(F32, "kernel_size", "n_ctx"), make_type(F32, "n_ctx")
    sampling, decode = BufferType(I32, ["slots", "record"], on), make_type(I32, "decode")
    message = (make_type(I32, name, f"{name}_values") for name in ("new", "prefill"))
    dims = ("decode", "decode", "targets", "scored", "scored", "named")
    scoring = [make_type(I32, dim) for dim in dims]
    pool = BufferType(F32, ["slots", "pool_width"], on)
    copied: Inputs = [pool, last_token, BufferType(F32, ["packed"], on), make_type(I32, "copied")]
    sampled: Inputs = [last_token, logits, sampling, decode, decode]
    slices, table = make_type(F32, "head", "slices", 2), make_type(F32, "vocab", "width")
    ops: dict[str, tuple[Callable[..., Any], Inputs]] = {
        "embed": (kernels.embed, [last_token, make_type(I32, "tokens"), rows, table]),
        "gather": (partial(kernels.copy_slots, gathers=True), copied),
        "scatter": (partial(kernels.copy_slots, gathers=False), copied),
        "mix": (kernels.mix, mix()),
        "mix_gamma": (kernels.mix, [*mix(), per_position]),
        "mix_silu": (partial(kernels.mix, silu=True), mix()),
        "mix_all": (partial(kernels.mix, silu=True), [*mix(), per_position, x]),
        "taps": (kernels.taps, [x, rows, bounds, *taps, x]),
        "edit": (kernels.edit, edit(F32)),
        "edit_bfloat16": (kernels.edit, edit(BF16)),
        "edit_slices": (_edit_slices, [*edit(F32), slices]),
        "constrain": (kernels.constrain, constrain(F32)),
        "constrain_bfloat16": (kernels.constrain, constrain(BF16)),
        "constrain_slices": (_constrain_slices, [*constrain(F32), slices]),
        "expand": (kernels.expand, [sampling, decode, decode, *message, make_type(I32, "fed")]),
        "sample": (kernels.sample, sampled),
        "reject": (partial(kernels.sample, rejects=True), sampled),
        "score": (kernels.score, [logits, sampling, *scoring]),
    }
    for name in ("edit", "constrain", "sample", "reject", "score"):
        call, inputs = ops[name]
        ops[f"{name}_padded"] = partial(call, padding=PADDING), inputs
    for name in READERS:
        call, inputs = ops[name]
        ops[f"{name}_padded"] = partial(call, padding=PADDING), inputs
    if on == HOST:
        ops["mix_float16"] = kernels.mix, mix(F16)
        for name in PRODUCTS:
            ops[name] = partial(_product, name), product(KINDS[name.partition(".")[0]])
        for kind in ("float32", "bfloat16"):
            row = make_type(KINDS[kind], "width")
            norm: Inputs = [make_type(KINDS[kind], "tokens", "width"), row, row]
            ops[f"{kind}.layer_norm"] = layer_norm, norm
    return ops


def _edit_slices(last_token: BufferValue, *given: TensorValue) -> None:
    kernels.edit(last_token, *given[:-1], slices=given[-1])


def _constrain_slices(last_token: BufferValue, sampling: BufferValue, *given: TensorValue) -> None:
    kernels.constrain(last_token, sampling, *given[:-1], slices=given[-1])


def _product(
    name: str, x: TensorValue, weight: TensorValue, bias: TensorValue, residual: TensorValue
) -> TensorValue:
    """Inputs that are not used give dimensions a value. Logits, of "head", are float32."""
    kind, _, epilogue = name.partition(".")
    has_bias, silu, has_residual = EPILOGUES[epilogue]
    return linear(
        *(x, weight, "columns"),
        bias=bias if has_bias else None,
        silu=silu,
        residual=residual if has_residual else None,
        rows="rows",
        out_dtype=F32 if epilogue == "head" else KINDS[kind],
        widen=kind == "widened",
    )


def _add_graph(module: Module, name: str, op: Callable[..., Any], inputs: Inputs) -> list[Path]:
    """Returns the compiled Mojo packages that the graph needs."""
    libraries = kernel_libraries()
    with Graph(name, input_types=inputs, custom_extensions=libraries, module=module) as graph:
        values = (
            value.buffer if isinstance(kind, BufferType) else value.tensor
            for value, kind in zip(graph.inputs, inputs, strict=True)
        )
        outputs = op(*values)
        outputs = () if outputs is None else outputs
        graph.output(*(outputs if isinstance(outputs, tuple) else (outputs,)))
    kernel_libraries_paths: list[Path] = graph.kernel_libraries_paths
    return kernel_libraries_paths
