"""Every op of `mojo_kernels/srm` as a graph of its own, with its inputs, at a model's shapes.

On a GPU, whose products are MAX's, the model's shapes are fixed in a graph as they are in the
step's; our own ops do not use that, so on a CPU one compiled module serves all models. Inputs are
those of an op in a step: rows in the middle of their context, in slots of their own, and a layer's
weights that earlier calls have not left in the cache. Knows no time and counts nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from max.driver import Buffer, Device
from max.dtype import DType
from max.engine import CompiledModel, InferenceSession
from max.graph import BufferType, DeviceRef, Graph, Module, TensorType, TensorValue

from bench.engine.counts import KERNEL_SIZE, PROMPT
from bench.engine.feeds import Array, Feeds
from engine.config import ModelConfig
from engine.device import kernels
from engine.device.graph_cache import cached
from engine.device.linear import kernel_libraries, layer_norm, linear, linear_shape, pack_linear
from engine.device.model import graph_shape
from engine.device.products import Product

I32, U64, F32 = DType.int32, DType.uint64, DType.float32
HOST = DeviceRef.CPU()
COLD_BYTES = 128 * 2**20
"""Total bytes of the copies of a weight that calls use in turn: more than a cache holds."""
MOST_COPIES = 256


Inputs = list[BufferType | TensorType]


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """An op: its graph's input types, the call that builds it, and its input arrays by rows."""

    types: Inputs
    call: Callable[..., Any]
    feed: Callable[[int], list[Array]]
    weight: int | None = None  # the input that is another copy in each call


class Ops:
    """The ops of a model of this shape and dtype, compiled once."""

    def __init__(
        self,
        model: ModelConfig,
        dtype: DType,
        device: Device,
        folder: Path,
        by: Product | None,
    ) -> None:
        self.device, session = device, InferenceSession(devices=[device])
        self.ops = build_ops(model, dtype, DeviceRef.from_device(device), by)
        shape = () if device.is_host else graph_shape(model, dtype, by)
        compiled = cached(
            "kernels",
            (dtype.name, tuple(self.ops), *shape),
            lambda: _compile(session, self.ops),
            device,
            folder,
        )
        self._models = session.init_all(compiled)

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


def _compile(session: InferenceSession, ops: dict[str, Op]) -> CompiledModel:
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
    return session.compile(module, custom_extensions=kernel_libraries())


def build_ops(model: ModelConfig, dtype: DType, on: DeviceRef, by: Product | None) -> dict[str, Op]:
    """Return by name the ops that `bench.engine.counts.count_op` counts, and "call", a no-op. On a
    GPU products are computed `by` one of those that there are."""
    d, vocab, state = model.d_model, model.vocab_size, model.state_width
    made = Feeds(model, is_narrow=dtype == DType.bfloat16, narrow_logits=on.is_gpu())

    def size(name: str, value: int) -> str | int:
        return value if on.is_gpu() else name

    def ints(*names: str) -> list[TensorType]:
        return [TensorType(I32, [name], on) for name in names]

    def product(inner: int, columns: int, *, is_head: bool = False, **how: Any) -> Op:
        has_residual = how.pop("residual", False)
        panels = ["panels", "words", *linear_shape(inner, columns, on, dtype)[2:]]
        weight = linear_shape(inner, columns, on, dtype) if on.is_gpu() else panels
        across = size("columns", columns)
        types: Inputs = [
            TensorType(dtype, ["tokens", size("inner", inner)], on),
            TensorType(dtype, weight, on),
            TensorType(dtype, [across], on),  # the head has no bias, but its output has a width
            *[TensorType(dtype, ["tokens", across], on)] * has_residual,
        ]

        def call(x: TensorValue, weight: TensorValue, bias: TensorValue, *rest: TensorValue) -> Any:
            how["out_dtype"] = logits.dtype if is_head else None
            how["residual"] = rest[0] if rest else None
            bias_or_none = None if is_head else bias
            return linear(x, weight, bias.shape[0], bias=bias_or_none, product=by, **how)

        def feed(rows: int) -> list[Array]:
            plain = made.values(inner, columns)
            laid_out = made.narrowed(plain.T) if on.is_gpu() else pack_linear(plain, dtype)
            residual = [made.stored(rows, columns)] * has_residual
            return [made.stored(rows, inner), laid_out, made.stored(columns), *residual]

        return Op(types, call, feed, weight=1)

    width = size("width", d)
    x, vector = TensorType(dtype, ["tokens", width], on), TensorType(dtype, [width], on)
    last_token, (rows, bounds) = BufferType(I32, ["slots"], on), ints("rows", "bounds")
    heads, n_ctx = size("heads", model.num_heads), size("n_ctx", model.n_ctx)
    scalars = TensorType(F32, [heads, n_ctx], on)
    pool = BufferType(F32, ["slots", size("state", state)], on)
    mixed: Inputs = [
        *(pool, TensorType(I32, [], HOST), x, rows, rows, rows, bounds),
        *(scalars, scalars, scalars, TensorType(F32, [2, heads], on)),
    ]
    tap = TensorType(F32, [size("kernel_size", KERNEL_SIZE), n_ctx], on)
    tapped: Inputs = [x, rows, bounds, tap, TensorType(F32, [n_ctx], on), x]
    table = TensorType(dtype, [size("vocab", vocab), width], on)
    logits = TensorType(dtype if on.is_gpu() else F32, ["head", size("vocab", vocab)], on)
    draws = [TensorType(kind, ["decode"], on) for kind in (F32, I32, F32, F32, U64)]
    sampled: Inputs = [last_token, logits, *draws, rows, rows]
    edited: Inputs = [
        *(last_token, logits, *ints("tokens", "rows", "edited")),
        TensorType(I32, ["edited", "span_bounds"], on),
        TensorType(F32, ["edited", "penalties"], on),
        *(*ints("edit_tokens"), TensorType(F32, ["biases"], on)),
    ]
    scored: Inputs = [logits, draws[0], *ints("decode", "head", "scored", "scored")]
    return {
        "call": Op([TensorType(F32, [1], on)], lambda x: x + 1, lambda _: [np.ones(1, np.float32)]),
        "embed": Op([last_token, *ints("tokens"), rows, table], kernels.embed, made.embed),
        "norm": Op([x, vector, vector], layer_norm, made.norm),
        "up": product(d, 4 * d, silu=True),
        "down": product(4 * d, d, residual=True),
        "proj_in": product(d, d),
        "mix": Op(mixed, kernels.mix, made.mix),
        "mix_prompts": Op(mixed, kernels.mix, partial(made.mix, length=PROMPT)),
        "taps": Op(tapped, kernels.taps, made.taps),
        "proj_out": product(d, d, residual=True),
        "head": product(d, vocab, is_head=True),
        "edit": Op(edited, kernels.edit, made.edit),
        "sample": Op(sampled, kernels.sample, made.sample),
        "sample_top_p": Op(sampled, kernels.sample, partial(made.sample, top_p=0.9)),
        "score": Op(scored, kernels.score, made.score),
    }
