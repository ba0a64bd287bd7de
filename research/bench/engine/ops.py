"""Every op of `mojo_kernels/srm` as a graph of its own, with its inputs, at a model's shapes.

On a GPU, whose products are MAX's, the model's shapes are fixed in a graph as they are in the
step's and weights are bound as there: as inputs they would compile to another kernel. Our own ops
do not use that, so on a CPU one compiled module serves all models, unless `bound` asks for what a
GPU has. Inputs are those of an op in a step: rows in the middle of their context, in slots of their
own, and, where weights are inputs, weights that earlier calls have not left in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from max.driver import Buffer, Device
from max.dtype import DType
from max.engine import CompiledModel, InferenceSession
from max.graph import (
    BufferType,
    DeviceRef,
    Graph,
    Module,
    TensorType,
    TensorValue,
    Weight,
)

from research.bench.engine.counts import KERNEL_SIZE, PROMPT
from research.bench.engine.feeds import Array, Feeds
from research.bench.engine.float8 import float8_ops
from research.bench.engine.op import Feed, Inputs, Op
from srm.engine.config import ModelConfig
from srm.engine.device import kernels
from srm.engine.device.graph_cache import Built, GraphCache
from srm.engine.device.linear import (
    kernel_libraries,
    layer_norm,
    linear,
    linear_shape,
    pack_linear,
    widen_bfloat16,
)
from srm.engine.device.model import NORMED, graph_shape
from srm.engine.device.products import (
    FLOAT8,
    NO_VARIANTS,
    SLICE,
    Product,
    ResidualStream,
    Variants,
    folds_norms,
    head_with_slices,
    moment_columns,
    multiply_into_stream,
    multiply_normed,
    padding_of,
)
from srm.engine.steps.batch import F32
from srm.engine.weights.float8 import from_e4m3

I32, FLOAT = DType.int32, DType.float32
HOST = DeviceRef.CPU()
COLD_BYTES = 128 * 2**20
"""Total bytes of the copies of a weight that calls use in turn: more than a cache holds."""
MOST_COPIES = 256
PRODUCTS = ("up", "down", "proj_in", "proj_out", "head")
"""Ops that are matrix products."""


class Variant(NamedTuple):
    """The model, device and dtype for which ops are built."""

    model: ModelConfig
    dtype: DType
    by: Product | None
    """The product of a GPU."""
    bound: bool
    """Whether weights are bound, as on every GPU."""
    variants: Variants = NO_VARIANTS


class Ops:
    """The ops of a model of this shape and dtype, compiled once.

    `weights` are those that are bound, by the name of their op: f32[K, N], as the dtype keeps them,
    or int8.
    """

    def __init__(
        self, variant: Variant, device: Device, folder: Path, only: Collection[str] = ()
    ) -> None:
        """Have these ops, or all."""
        model, dtype = variant.model, variant.dtype
        self.device, self.dtype = device, dtype
        session = InferenceSession(devices=[device])
        self.ops = build_ops(variant, DeviceRef.from_device(device), only)
        compiled = load_ops(GraphCache(session, device, folder), self.ops, variant)
        self.weights: dict[str, Array] = {}
        registry = {}
        feeds = Feeds(model, is_narrow=dtype == DType.bfloat16, narrow_logits=not device.is_host)
        for name, op in self.ops.items():
            if op.bits is not None:
                in_int8 = op.bits.dtype == np.int8
                bound = Buffer.from_numpy(op.bits)
                registry[name] = bound if in_int8 else bound.view(FLOAT8, op.bits.shape)
                self.weights[name] = op.bits.T if in_int8 else from_e4m3(op.bits.T)
            if op.bound:
                stored = feeds.weight(*op.bound)
                plain = self.weights[name] = widened(stored)
                on_gpu = np.ascontiguousarray(stored.T)
                laid_out = pack_linear(plain, dtype) if device.is_host else on_gpu
                registry[name] = Buffer.from_numpy(laid_out).view(dtype, laid_out.shape)
        self._models = session.init_all(compiled, weights_registry=registry)

    def run(self, name: str, rows: int) -> tuple[list[Array], list[Array], list[Array]]:
        """Call an op once; return its inputs, its outputs, and the inputs afterwards."""
        op = self.ops[name]
        arrays = op.feed(rows)
        before = [array.copy() for array in arrays]  # a processor changes these in place
        given = self._upload_all(op, arrays)
        outputs = [_array(buffer) for buffer in self._models[name].execute(*given)]
        return before, outputs, [_array(handed) for handed in given]

    def prepare(self, name: str, rows: int) -> Callable[[], object]:
        """Return a function that calls an op on so many rows, to be called repeatedly."""
        op = self.ops[name]
        arrays = op.feed(rows)
        fixed = self._upload_all(op, arrays)
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

    def upload(self, name: str, rows: int) -> list[Buffer]:
        """Return inputs of an op on so many rows, where it reads them."""
        op = self.ops[name]
        return self._upload_all(op, op.feed(rows))

    def bind(self, name: str, inputs: list[Buffer]) -> Callable[[], object]:
        """Return a function that calls an op on these inputs."""
        return partial(self._models[name].execute, *inputs)

    def _upload_all(self, op: Op, arrays: list[Array]) -> list[Buffer]:
        return [self._upload(array, kind) for array, kind in zip(arrays, op.types, strict=True)]

    def _upload(self, array: Array, kind: BufferType | TensorType) -> Buffer:
        buffer = Buffer.from_numpy(array)
        buffer = buffer if kind.device == HOST else buffer.to(self.device)
        return buffer.view(kind.dtype, array.shape)  # numpy has no bfloat16, only its bits


def widened(array: Array) -> F32:
    """Return the float32 that stored values mean: bits of bfloat16, or float32 itself."""
    return array if array.dtype == np.float32 else widen_bfloat16(array)


def _array(buffer: Buffer) -> Array:
    bits = {DType.bfloat16: DType.uint16, FLOAT8: DType.uint8}.get(buffer.dtype, buffer.dtype)
    array: Array = buffer.view(bits, buffer.shape).to_numpy()
    return array


def load_ops(cache: GraphCache, ops: dict[str, Op], variant: Variant) -> CompiledModel:
    """Return the graphs of `build_ops`, from the cache if they are there."""
    model, dtype, by, bound, variants = variant
    shape = ("bound", *graph_shape(model, dtype, by, variants=variants)) if bound else ()
    key = (dtype.name, tuple(ops), *shape)
    return cache.load("kernels", key, lambda: _build(ops))


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


class _Dense(NamedTuple):
    """A matrix product of a step: how many widths of the model go in and come out."""

    inner: int
    columns: int
    """0: the vocabulary."""
    silu: bool = False
    has_residual: bool = False


_MIXED = "pool layer x rows rows rows bounds scalars scalars scalars decay"
_SAMPLED = "last_token logits records decode decode"
_EDITED = "last_token logits tokens rows edited spans penalties edit_tokens biases masks"
_CONSTRAINED = "last_token records logits decode decode table_entries"
_TABLE: dict[str, _Dense | tuple[str, Callable[..., Any], Callable[..., list[Array]]]] = {
    "call": ("one", lambda x: x + 1, lambda *_: [np.ones(1, np.float32)]),
    "expand": ("records decode decode new prefill fed", kernels.expand, Feeds.expand),
    "embed": ("last_token tokens rows table", kernels.embed, Feeds.embed),
    "norm": ("x vector vector", layer_norm, Feeds.norm),
    "up": _Dense(1, 4, silu=True),
    "down": _Dense(4, 1, has_residual=True),
    "proj_in": _Dense(1, 1),
    "mix": (_MIXED, kernels.mix, Feeds.mix),
    "mix_prompts": (_MIXED, kernels.mix, partial(Feeds.mix, length=PROMPT)),
    "taps": ("x rows bounds tap beta x", kernels.taps, Feeds.taps),
    "proj_out": _Dense(1, 1, has_residual=True),
    "head": _Dense(1, 0),
    "sample_slices": (f"{_SAMPLED} slices", kernels.sample, Feeds.sample_slices),
    "edit": (_EDITED, kernels.edit, Feeds.edit),
    "constrain": (_CONSTRAINED, kernels.constrain, Feeds.constrain),
    "sample": (_SAMPLED, kernels.sample, Feeds.sample),
    "sample_top_p": (_SAMPLED, kernels.sample, partial(Feeds.sample, top_p=0.9)),
    "score": (
        "logits records decode decode targets scored scored named",
        kernels.score,
        Feeds.score,
    ),
}
"""Of each op the names of its inputs, what calls it and what makes them; or its product."""
_TYPES = {
    "one": "float 1",
    "x": "stored tokens width",
    "vector": "stored width",
    "table": "stored vocab width",
    "last_token": "int slots",
    "records": "int slots record",
    "pool": "float slots state",
    "layer": "int",
    "new": "int new new_values",
    "prefill": "int prefill prefill_values",
    "scalars": "float heads n_ctx",
    "decay": "float 2 heads",
    "tap": "float kernel_size n_ctx",
    "beta": "float n_ctx",
    "logits": "logit head logits",
    "slices": "float head slices 2",
    "table_entries": "short table_entries",
    "spans": "int edited span_bounds",
    "penalties": "float edited penalties",
    "biases": "float biases",
    "factor": "stored tokens inner",
    "weight": "stored panels words panel pair",
    "column": "stored columns",
    "residual": "stored tokens columns",
    "of_columns": "float columns 2",
    "moments": "float tokens inner_slices 2",
}
"""What inputs consist of, and their dimensions. One that is not here is a list of integers."""
_CHANGED = {"last_token", "records", "pool"}
"""Inputs that ops change in place."""


def build_ops(variant: Variant, on: DeviceRef, only: Collection[str] = ()) -> dict[str, Op]:
    """Return by name these ops, or all that `research.bench.engine.counts.count_op` counts, and
    "call", a no-op.

    Where norms are folded, the products behind them take moments, those before them and "embed"
    write them, and there is no "norm". In FLOAT8 there are those that are not as in bfloat16. The
    "own" product's head leaves slices, and a sampler reads them.
    """
    if variant.dtype == FLOAT8:
        ops = float8_ops(variant.model, on, variant.variants)
        return {name: op for name, op in ops.items() if not only or name in only}
    maker = _Maker(variant, on)
    absent = {"norm" if maker.folds else "", "" if variant.by == "own" else "sample_slices"}
    names = [name for name in _TABLE if name not in absent and (not only or name in only)]
    return {name: maker.op(name) for name in names}


class _Maker:
    """Makes the ops of a model; dimensions that are not bound are known by name."""

    def __init__(self, variant: Variant, on: DeviceRef) -> None:
        model, dtype, by, bound, self._variants = variant
        assert bound or not on.is_gpu()
        self._model, self._on, self._by, self._bound = model, on, by, bound
        self.folds = folds_norms(by, model, dtype)
        logit = dtype if on.is_gpu() else FLOAT
        self._dtypes = {"stored": dtype, "logit": logit, "int": I32, "float": FLOAT}
        self._dtypes |= {"short": DType.uint16}
        self._padding = padding_of(model.vocab_size) if by == "own" else 0
        narrow = {"is_narrow": dtype == DType.bfloat16, "narrow_logits": on.is_gpu()}
        self._feeds = Feeds(model, **narrow, padding=self._padding)
        sizes = {"width": model.d_model, "vocab": model.vocab_size, "state": model.state_width}
        sizes |= {"heads": model.num_heads, "n_ctx": model.n_ctx, "kernel_size": KERNEL_SIZE}
        sizes["logits"] = model.vocab_size + self._padding
        self._sizes = {"slices": sizes["logits"] // SLICE} | (sizes if bound else {})

    def op(self, name: str) -> Op:
        row = _TABLE[name]
        if isinstance(row, _Dense):
            return self._product(name, row)
        inputs, call, feed = row
        if self.folds and name == "embed":
            call = kernels.embed_stream
        if call is kernels.sample and "rejection" in self._variants:
            call = partial(call, rejects=True)
            if name == "sample_top_p" and self._by == "own":
                inputs, feed = f"{_SAMPLED} slices", partial(Feeds.sample_slices, top_p=0.9)
        if "logits" in inputs.split():
            call = partial(call, padding=self._padding)
        return Op(self._input_types(inputs, self._sizes), call, partial(feed, self._feeds))

    def _input_types(self, inputs: str, sizes: dict[str, int]) -> Inputs:
        types: Inputs = []
        for name in inputs.split():
            kind, *names = _TYPES.get(name, f"int {name}").split()
            shape = [int(name) if name.isdecimal() else sizes.get(name, name) for name in names]
            make = BufferType if name in _CHANGED else TensorType
            types.append(make(self._dtypes[kind], shape, self._on if shape else HOST))
        return types

    def _product(self, name: str, row: _Dense) -> Op:
        inner, columns = row.inner * self._model.d_model, row.columns * self._model.d_model
        columns = columns or self._model.vocab_size
        shape = linear_shape(inner, columns, self._on, self._dtypes["stored"])
        sizes = dict(zip(("panel", "pair"), shape[2:], strict=False)) | self._sizes
        if self._bound:
            sizes |= {
                "inner": inner,
                "columns": columns,
                "inner_slices": inner // moment_columns(inner),
            }
        inputs = "factor column residual" if row.has_residual else "factor column"
        feed: Feed = partial(self._factors, inner, columns, row.has_residual)
        if name == "head" and self._by == "own":
            inputs, feed = "factor records decode", self._feeds.head
        elif self.folds and name in NORMED:
            inputs = "factor of_columns moments"
            feed = partial(self._feeds.normed, inner=inner, columns=columns)
        elif not self._bound:
            inputs = inputs.replace("factor", "factor weight")
        return Op(
            self._input_types(inputs, sizes),
            partial(self._multiply, name, row, shape),
            feed,
            weight=None if self._bound else 1,
            bound=(inner, columns) if self._bound else None,
        )

    def _factors(self, inner: int, columns: int, has_residual: bool, rows: int) -> list[Array]:
        made, weight = self._feeds, []
        if not self._bound:
            weight = [pack_linear(made.values(inner, columns), self._dtypes["stored"])]
        residual = [made.stored(rows, columns)] * has_residual
        # The head has no bias, but its output has a width.
        return [made.stored(rows, inner), *weight, made.stored(columns), *residual]

    def _multiply(
        self, name: str, row: _Dense, shape: tuple[int, ...], x: TensorValue, *rest: Any
    ) -> Any:
        if self._bound:
            rest = (Weight(name, self._dtypes["stored"], shape, self._on), *rest)
        weight, column, *more = rest
        if name == "head" and self._by == "own":
            return head_with_slices(x, weight, "tokens", column, more[0], self._variants)
        if self.folds and name in NORMED:
            stream = ResidualStream(x, *more)
            return multiply_normed(stream, weight, column, row.silu, self._variants)
        if self.folds and row.has_residual:
            stream = ResidualStream(*more)
            return multiply_into_stream(x, weight, column, stream, self._variants)
        last = {"out_dtype": self._dtypes["logit"]} if name == "head" else {"bias": column}
        how = last | ({"residual": more[0]} if more else {})
        return linear(x, weight, column.shape[0], silu=row.silu, product=self._by, **how)
