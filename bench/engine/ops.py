"""Every op of `mojo_kernels/srm` as a graph of its own, with its inputs, at a model's shapes.

On a GPU, whose products are MAX's, the model's shapes are fixed in a graph as they are in the
step's and weights are bound as there: as inputs they would compile to another kernel. Our own ops
do not use that, so on a CPU one compiled module serves all models, unless `bound` asks for what a
GPU has. Inputs are those of an op in a step: rows in the middle of their context, in slots of their
own, and, where weights are inputs, weights that earlier calls have not left in the cache. Knows no
time and counts nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from max.driver import Buffer, Device
from max.dtype import DType
from max.engine import CompiledModel, InferenceSession
from max.graph import (
    BufferType,
    BufferValue,
    DeviceRef,
    Graph,
    Module,
    TensorType,
    TensorValue,
    Weight,
)

from bench.engine.counts import KERNEL_SIZE, PROMPT
from bench.engine.feeds import Array, Feeds
from bench.engine.float8 import float8_ops
from bench.engine.op import Inputs, Op
from engine.config import ModelConfig
from engine.device import kernels
from engine.device.graph_cache import Built, cached
from engine.device.linear import (
    kernel_libraries,
    layer_norm,
    linear,
    linear_shape,
    pack_linear,
    widen_bfloat16,
)
from engine.device.model import NORMED, graph_shape
from engine.device.products import (
    FLOAT8,
    SLICE,
    Product,
    Stream,
    folds_norms,
    head_with_slices,
    multiply_into_stream,
    multiply_normed,
    stream_types,
)
from engine.steps.batch import F32
from engine.weights.float8 import from_e4m3

I32, FLOAT = DType.int32, DType.float32
HOST = DeviceRef.CPU()
COLD_BYTES = 128 * 2**20
"""Total bytes of the copies of a weight that calls use in turn: more than a cache holds."""
MOST_COPIES = 256


class Ops:
    """The ops of a model of this shape and dtype, compiled once.

    `weights` are those that are bound, by the name of their op: f32[K, N], as the dtype keeps them.
    `only` names ops, if not all are wanted. On a GPU products are computed `by` one of those that
    there are.
    """

    def __init__(
        self,
        model: ModelConfig,
        dtype: DType,
        device: Device,
        folder: Path,
        by: Product | None,
        bound: bool | None = None,
        only: tuple[str, ...] = (),
    ) -> None:
        self.device, self.dtype = device, dtype
        session = InferenceSession(devices=[device])
        bound = not device.is_host if bound is None else bound
        ops = build_ops(model, dtype, DeviceRef.from_device(device), by, bound)
        self.ops = {name: op for name, op in ops.items() if name in (only or ops)}
        compiled = load_ops(session, self.ops, model, dtype, device, folder, by, bound)
        self.weights, registry = {}, {}
        feeds = Feeds(model, is_narrow=dtype == DType.bfloat16, narrow_logits=not device.is_host)
        for name, op in self.ops.items():
            if op.bits is not None:
                self.weights[name] = from_e4m3(op.bits.T)
                registry[name] = Buffer.from_numpy(op.bits).view(FLOAT8, op.bits.shape)
            if op.bound:
                kept = feeds.weight(*op.bound)
                plain = self.weights[name] = widened(kept)
                on_gpu = np.ascontiguousarray(kept.T)
                laid_out = pack_linear(plain, dtype) if device.is_host else on_gpu
                registry[name] = Buffer.from_numpy(laid_out).view(dtype, laid_out.shape)
        self._models = session.init_all(compiled, weights_registry=registry)

    def run(self, name: str, rows: int) -> tuple[list[Array], list[Array], list[Array]]:
        """Call an op once; return its inputs, its outputs, and the inputs afterwards."""
        op = self.ops[name]
        arrays = op.feed(rows)
        before = [array.copy() for array in arrays]  # a processor changes these in place
        given = [self._upload(array, kind) for array, kind in zip(arrays, op.types, strict=True)]
        outputs = [_array(one) for one in self._models[name].execute(*given)]
        return before, outputs, [_array(one) for one in given]

    def prepare(self, name: str, rows: int) -> Callable[[], object]:
        """Return a function that calls an op on so many rows, to be called repeatedly."""
        op = self.ops[name]
        arrays = op.feed(rows)
        fixed = [self._upload(array, kind) for array, kind in zip(arrays, op.types, strict=True)]
        calls = [fixed]
        if op.weight is not None:
            place = op.weight
            copies = min(MOST_COPIES, -(-COLD_BYTES // arrays[place].nbytes))
            for _ in range(copies - 1):
                again = self._upload(arrays[place].copy(), op.types[place])
                calls.append([*fixed[:place], again, *fixed[place + 1 :]])
        model, turn = self._models[name], -1

        def run() -> None:
            nonlocal turn
            turn = (turn + 1) % len(calls)
            model.execute(*calls[turn])

        return run

    def _upload(self, array: Array, kind: BufferType | TensorType) -> Buffer:
        buffer = Buffer.from_numpy(array)
        buffer = buffer if kind.device == HOST else buffer.to(self.device)
        return buffer.view(kind.dtype, array.shape)  # numpy has no bfloat16, only its bits


def widened(kept: Array) -> F32:
    """Return the float32 that stored values mean: bits of bfloat16, or float32 itself."""
    return kept if kept.dtype == np.float32 else widen_bfloat16(kept)


def _array(buffer: Buffer) -> Array:
    bits = {DType.bfloat16: DType.uint16, FLOAT8: DType.uint8}.get(buffer.dtype, buffer.dtype)
    found: Array = buffer.view(bits, buffer.shape).to_numpy()
    return found


def load_ops(
    session: InferenceSession,
    ops: dict[str, Op],
    model: ModelConfig,
    dtype: DType,
    device: Device,
    folder: Path,
    by: Product | None,
    bound: bool,
) -> CompiledModel:
    """Return the graphs of `build_ops`, from `folder` if they are there."""
    shape = ("bound", *graph_shape(model, dtype, by)) if bound else ()
    key = (dtype.name, tuple(ops), *shape)
    return cached("kernels", key, lambda: _build(ops), session, device, folder)


def _build(ops: dict[str, Op]) -> Built:
    module = Module()
    for name, op in ops.items():
        with Graph(
            name, input_types=op.types, custom_extensions=kernel_libraries(), module=module
        ) as graph:
            values = (
                value.buffer if isinstance(kind, BufferType) else value.tensor
                for value, kind in zip(graph.inputs, op.types, strict=True)
            )
            made = op.call(*values)
            outputs = () if made is None else made if isinstance(made, tuple) else (made,)
            graph.output(*outputs)
    return module, kernel_libraries()


def build_ops(
    model: ModelConfig, dtype: DType, on: DeviceRef, by: Product | None, bound: bool
) -> dict[str, Op]:
    """Return by name the ops that `bench.engine.counts.count_op` counts, and "call", a no-op.

    Where norms are folded, the products behind them take moments, those before them and "embed"
    write them, and there is no "norm". In FLOAT8 there are those that are not as in bfloat16. The
    "own" product's head leaves slices, and a sampler reads them.
    """
    if dtype == FLOAT8:
        return float8_ops(model, on)
    d, vocab, state = model.d_model, model.vocab_size, model.state_width
    folds = folds_norms(by, model, dtype)
    assert bound or not folds
    made = Feeds(model, is_narrow=dtype == DType.bfloat16, narrow_logits=on.is_gpu())

    def size(name: str, value: int) -> str | int:
        return value if bound else name

    def ints(*names: str) -> list[TensorType]:
        return [TensorType(I32, [name], on) for name in names]

    def product(
        name: str, inner: int, columns: int, *, is_head: bool = False, **how: Any
    ) -> dict[str, Op]:
        has_residual = how.pop("residual", False)
        laid_out = linear_shape(inner, columns, on, dtype)
        if folds and name in NORMED:
            return {name: normed(name, inner, columns, how.get("silu", False))}
        across = size("columns", columns)
        types: Inputs = [
            TensorType(dtype, ["tokens", size("inner", inner)], on),
            *[TensorType(dtype, ["panels", "words", *laid_out[2:]], on)] * (not bound),
            TensorType(dtype, [across], on),  # the head has no bias, but its output has a width
            *[TensorType(dtype, ["tokens", across], on)] * has_residual,
        ]

        def call(x: TensorValue, *rest: TensorValue) -> Any:
            weight, *others = (Weight(name, dtype, laid_out, on), *rest) if bound else rest
            how["out_dtype"] = logits.dtype if is_head else None
            how["residual"] = others[1] if has_residual else None
            bias = None if is_head else others[0]
            if folds and has_residual:
                return multiply_into_stream(x, weight, bias, Stream(others[1]))
            return linear(x, weight, others[0].shape[0], bias=bias, product=by, **how)

        def feed(rows: int) -> list[Array]:
            weight = [] if bound else [pack_linear(made.values(inner, columns), dtype)]
            residual = [made.stored(rows, columns)] * has_residual
            return [made.stored(rows, inner), *weight, made.stored(columns), *residual]

        shape = (inner, columns) if bound else None
        return {name: Op(types, call, feed, None if bound else 1, shape)}

    def head(x: TensorValue, sampling: BufferValue, slots: TensorValue) -> Any:
        return head_with_slices(x, Weight("head", dtype, (vocab, d), on), "tokens", sampling, slots)

    def normed(name: str, inner: int, columns: int, silu: bool) -> Op:
        def call(x: TensorValue, of_columns: TensorValue, moments: TensorValue) -> TensorValue:
            weight = Weight(name, dtype, (columns, inner), on)
            return multiply_normed(Stream(x, moments), weight, of_columns, silu)

        of_columns = TensorType(FLOAT, [columns, 2], on)
        x, moments = stream_types(TensorType(dtype, ["tokens", inner], on))
        feed = partial(made.normed, inner=inner, columns=columns)
        return Op([x, of_columns, moments], call, feed, None, (inner, columns))

    width = size("width", d)
    x, vector = TensorType(dtype, ["tokens", width], on), TensorType(dtype, [width], on)
    last_token, (rows, bounds) = BufferType(I32, ["slots"], on), ints("rows", "bounds")
    heads, n_ctx = size("heads", model.num_heads), size("n_ctx", model.n_ctx)
    scalars = TensorType(FLOAT, [heads, n_ctx], on)
    pool = BufferType(FLOAT, ["slots", size("state", state)], on)
    mixed: Inputs = [
        *(pool, TensorType(I32, [], HOST), x, rows, rows, rows, bounds),
        *(scalars, scalars, scalars, TensorType(FLOAT, [2, heads], on)),
    ]
    tap = TensorType(FLOAT, [size("kernel_size", KERNEL_SIZE), n_ctx], on)
    tapped: Inputs = [x, rows, bounds, tap, TensorType(FLOAT, [n_ctx], on), x]
    table = TensorType(dtype, [size("vocab", vocab), width], on)
    logits = TensorType(dtype if on.is_gpu() else FLOAT, ["head", size("vocab", vocab)], on)
    sampling = BufferType(I32, ["slots", "record"], on)
    sampled: Inputs = [last_token, logits, sampling, *ints("decode", "decode")]
    said = [TensorType(I32, [name, f"{name}_values"], on) for name in ("new", "prefill")]
    expanded: Inputs = [sampling, *ints("decode", "decode"), *said, *ints("fed")]
    edited: Inputs = [
        *(last_token, logits, *ints("tokens", "rows", "edited")),
        TensorType(I32, ["edited", "span_bounds"], on),
        TensorType(FLOAT, ["edited", "penalties"], on),
        *(*ints("edit_tokens"), TensorType(FLOAT, ["biases"], on)),
    ]
    scores = ints("decode", "decode", "targets", "scored", "scored")
    scored: Inputs = [logits, sampling, *scores]
    of_slices = TensorType(FLOAT, ["head", vocab // SLICE, 2], on)
    sliced = {
        "head": Op([x, sampling, *ints("decode")], head, made.head, None, (d, vocab)),
        "sample_slices": Op([*sampled, of_slices], kernels.sample, made.sample_slices),
    }
    return {
        "call": Op(
            [TensorType(FLOAT, [1], on)], lambda x: x + 1, lambda _: [np.ones(1, np.float32)]
        ),
        "expand": Op(expanded, kernels.expand, made.expand),
        "embed": Op(
            [last_token, *ints("tokens"), rows, table],
            kernels.embed_stream if folds else kernels.embed,
            made.embed,
        ),
        **({} if folds else {"norm": Op([x, vector, vector], layer_norm, made.norm)}),
        **product("up", d, 4 * d, silu=True),
        **product("down", 4 * d, d, residual=True),
        **product("proj_in", d, d),
        "mix": Op(mixed, kernels.mix, made.mix),
        "mix_prompts": Op(mixed, kernels.mix, partial(made.mix, length=PROMPT)),
        "taps": Op(tapped, kernels.taps, made.taps),
        **product("proj_out", d, d, residual=True),
        **(sliced if by == "own" else product("head", d, vocab, is_head=True)),
        "edit": Op(edited, kernels.edit, made.edit),
        "sample": Op(sampled, kernels.sample, made.sample),
        "sample_top_p": Op(sampled, kernels.sample, partial(made.sample, top_p=0.9)),
        "score": Op(scored, kernels.score, made.score),
    }
