"""The SRM step as one MAX graph: a ragged batch in, sampled tokens out, the state pool moved on.

Prefill rows and decode rows go through the blocks together; only the first tokens, those of decode
rows and of prompts that are scored, go through the output head. Shapes that change from step to
step (rows, tokens, decode rows, slots) are symbolic, so one compiled graph serves every batch.
Weights are bound when the graph is initialised, not when it is compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from max.driver import Device
from max.dtype import DType
from max.graph import (
    BufferType,
    BufferValue,
    DeviceRef,
    Dim,
    Graph,
    Module,
    TensorType,
    TensorValue,
    Weight,
    ops,
)

from srm.engine.config import ModelConfig
from srm.engine.device.kernels import (
    constrain,
    copy_slots,
    edit,
    embed,
    embed_stream,
    expand,
    mix,
    sample,
    score,
    taps,
)
from srm.engine.device.linear import (
    kernel_libraries,
    layer_norm,
    layer_norm_8bit,
    linear,
    linear_shape,
)
from srm.engine.device.products import (
    FLOAT8,
    NO_VARIANTS,
    Product,
    ResidualStream,
    Variants,
    dtype_of_mixers,
    folds_norms,
    head_with_slices,
    multiply_8bit,
    multiply_8bit_into_stream,
    multiply_and_mix,
    multiply_into_stream,
    multiply_normed,
    padding_of,
)
from srm.engine.messages import MAX_LOGPROBS
from srm.engine.steps.batch import NEW_ROW, PREFILL_ROW, SAMPLING

MATRICES = {"up_weight", "down_weight", "proj_in_weight", "proj_out_weight", "head"}
"""Weights of matrix products, in the layout of `linear`."""
PER_POSITION = ("alpha_in", "alpha_out", "beta")
SCALARS = {*PER_POSITION, "gamma", "decay", "taps", "taps_beta"}
"""Weights of the mixer, always float32, since 0.999 is 1.0 in bfloat16."""
NORMED = {"up": "channel_norm", "proj_in": "token_norm"}
"""Products and the norms before them. Where `folds_norms` says so, a product has `<name>_columns`
of `fold_norm`, always float32, instead of a bias and of the norm's two weights. In FLOAT8 channel
mixers have what `engine.weights.float8` says."""
BATCH_INPUTS = {
    "slots": ("decode",),
    "positions": ("decode",),
    "new": ("new", NEW_ROW.itemsize // 4),
    "prefill": ("prefill", PREFILL_ROW.itemsize // 4),
    "token_ids": ("fed",),
    "targets": ("targets",),
    "score_rows": ("scored",),
    "num_top": ("scored",),
    "named": ("named",),
}
"""Dimensions of each input, all int32, which are fields of `engine.steps.batch.Batch`; they follow
those of the pool."""
EDIT_INPUTS = {
    "rows": (DType.int32, ("edited",)),
    "spans": (DType.int32, ("edited", "span_bounds")),
    "penalties": (DType.float32, ("edited", "penalties")),
    "tokens": (DType.int32, ("edit_tokens",)),
    "biases": (DType.float32, ("biases",)),
    "masks": (DType.int32, ("mask_words",)),
}
"""Dtype and dimensions of each input, which are fields of `engine.steps.batch.Edits`; they come
last."""


def graph_shape(
    config: ModelConfig,
    dtype: DType,
    product: Product | None = None,
    max_logprobs: int = MAX_LOGPROBS,
    variants: Variants = NO_VARIANTS,
) -> tuple[object, ...]:
    """Return all but the device that a graph depends on; models that agree in it share one. On a
    GPU `product` is its matrix product, on a CPU there is none to choose."""
    has_own_graph = config.mixer in {"diagonal", "kernel", "combined", "expanded"}
    return (
        config.d_model,
        config.num_layers,
        config.num_heads,
        config.n_ctx,
        config.vocab_size,
        config.use_projections,
        config.mixer if has_own_graph else "one unit a layer",
        config.kernel_size,
        dtype.name,
        *([product] if product else []),
        *([max_logprobs] if max_logprobs != MAX_LOGPROBS else []),
        *sorted(variants),
    )


def build_step_graph(
    config: ModelConfig,
    dtype: DType,
    device: Device,
    scope: str = "",
    module: Module | None = None,
    product: Product | None = None,
    max_logprobs: int = MAX_LOGPROBS,
    variants: Variants = NO_VARIANTS,
) -> Graph:
    """The step of a model of this shape, with weights and activations of this dtype, and on a GPU
    this product, `choose_product`'s. In FLOAT8 they are those of channel mixers, others bfloat16.
    `variants` are those of `choose_variants`.

    Inputs, in order: states f32[slots, W], last_token i32[slots] and sampling i32[slots, 9], all
    changed in place; tables u16[N]; BATCH_INPUTS and EDIT_INPUTS. Outputs: token_ids
    i32[decode], logprobs f32[decode], and those of `Scores`. `engine.steps.batch` says what each
    means. The names of the graph and of its weights begin with `scope`, so that graphs of many
    models can be compiled as one `module`, which takes hardly longer than one of them.
    """
    on = DeviceRef.from_device(device)
    types = [
        *_pool_types(config.state_width, on),
        BufferType(DType.int32, ["slots", SAMPLING.itemsize // 4], on),
        TensorType(DType.uint16, ["table_entries"], on),
        *(TensorType(DType.int32, dims, on) for dims in BATCH_INPUTS.values()),
        *(TensorType(dtype, dims, on) for dtype, dims in EDIT_INPUTS.values()),
    ]
    name = f"{scope}srm_step"
    with Graph(
        name, input_types=types, custom_extensions=kernel_libraries(), module=module
    ) as graph:
        states, last_token, sampling = (value.buffer for value in graph.inputs[:3])
        tables, *given = (value.tensor for value in graph.inputs[3:])
        edits = given[len(BATCH_INPUTS) :]
        slots, positions, new, prefill, token_ids, targets, *scored = given[: len(BATCH_INPUTS)]
        rows = expand(sampling, slots, positions, new, prefill, token_ids)
        batch = replace(_Rows(states, last_token, *rows), slots=slots)
        weights = _Weights(config, dtype, on, product, scope, variants=variants)
        head = slots.shape[0] + targets.shape[0] - 1
        stream, slices, padding = _blocks(weights, batch), None, 0
        if product == "own":
            padding = padding_of(config.vocab_size)
            matrix = weights.matrix("head", config.d_model, config.vocab_size)
            logits, slices = head_with_slices(stream, matrix, head, sampling, slots, variants)
        else:
            logits = _head(weights, stream, rows=head)
        pdl = weights.pdl
        of_edited = last_token, logits, batch.token_ids, batch.read_slots, *edits
        edit(*of_edited, slices=slices, padding=padding, pdl=pdl)
        of_constrained = last_token, sampling, logits, positions, slots, tables
        constrain(*of_constrained, slices=slices, padding=padding)
        rejects = "rejection" in variants
        sampled = last_token, logits, sampling, positions, slots, slices
        tokens, logprobs = sample(*sampled, rejects=rejects, padding=padding, pdl=pdl)
        given_scores = logits, sampling, slots, tokens, targets, *scored
        scores = score(*given_scores, most=max_logprobs, padding=padding, pdl=pdl)
        graph.output(tokens, logprobs, *scores)
    return graph


def build_logits_graph(
    config: ModelConfig,
    dtype: DType,
    device: Device,
    scope: str = "",
    module: Module | None = None,
    product: Product | None = None,
) -> Graph:
    """The same step without the sampler: logits float[tokens, V] of every token fed. Its inputs are
    the pool, whose last tokens are not changed, and the rows as `expand` makes them."""
    on = DeviceRef.from_device(device)
    rows = [TensorType(DType.int32, [dim], on) for dim in ("tokens", *["rows"] * 3, "row_bounds")]
    with Graph(
        f"{scope}srm_logits",
        input_types=[*_pool_types(config.state_width, on), *rows],
        custom_extensions=kernel_libraries(),
        module=module,
    ) as graph:
        weights = _Weights(config, dtype, on, product, scope)
        pool = [value.buffer for value in graph.inputs[:2]]
        batch = _Rows(*pool, *(value.tensor for value in graph.inputs[2:]))
        graph.output(_head(weights, _blocks(weights, batch)))
    return graph


GATHER_SLOTS, SCATTER_SLOTS = "gather_slots", "scatter_slots"


def build_slot_graphs(device: Device) -> tuple[Module, list[Path]]:
    """The graphs GATHER_SLOTS and SCATTER_SLOTS, for states of any width.

    Inputs: states f32[slots, W] and last_token i32[slots]; packed f32[P] and slots i32[N], as
    `copy_slots` has them. Nothing comes out: one changes `packed`, the other the pool. With the
    module come the kernels that it is compiled with.
    """
    on, module = DeviceRef.from_device(device), Module()
    types = [
        *_pool_types("width", on),
        BufferType(DType.float32, ["packed"], on),
        TensorType(DType.int32, ["copied"], on),
    ]
    for name, gathers in {GATHER_SLOTS: True, SCATTER_SLOTS: False}.items():
        with Graph(
            name, input_types=types, custom_extensions=kernel_libraries(), module=module
        ) as graph:
            states, last_token, packed = (value.buffer for value in graph.inputs[:3])
            copy_slots(states, last_token, packed, graph.inputs[3].tensor, gathers=gathers)
            graph.output()
    return module, graph.kernel_libraries_paths


def _pool_types(width: int | str, on: DeviceRef) -> list[BufferType]:
    """Of states and last tokens."""
    return [
        BufferType(DType.float32, ["slots", width], on),
        BufferType(DType.int32, ["slots"], on),
    ]


@dataclass(frozen=True, slots=True)
class _Rows:
    """The pool, and where each row of the batch reads, writes and stands."""

    states: BufferValue  # f32[slots, W], W = config.state_width
    last_token: BufferValue  # i32[slots]
    token_ids: TensorValue  # i32[tokens]
    read_slots: TensorValue  # i32[rows]
    write_slots: TensorValue  # i32[rows]
    positions: TensorValue  # i32[rows]
    row_offsets: TensorValue  # i32[rows + 1]
    slots: TensorValue | None = None  # i32[decode], where it is known which rows decode


def _blocks(weights: _Weights, batch: _Rows) -> TensorValue:
    """Return the residual stream [tokens, d] after all blocks."""
    config = weights.config
    table = weights.table("embedding", config.vocab_size, config.d_model)
    tokens = batch.last_token, batch.token_ids, batch.read_slots, table, weights.pdl
    # In FLOAT8 the first to read the stream is a norm.
    folds = folds_norms(weights.product, config, weights.dtype)
    has_moments = folds and weights.dtype != FLOAT8
    stream = embed_stream(*tokens) if has_moments else ResidualStream(embed(*tokens))
    for index in range(config.num_layers):
        layer = weights.layer(index)
        stream = _mix_channels(layer, stream)
        stream = _mix_tokens(layer, stream, batch)
    return stream.values


def _head(weights: _Weights, x: TensorValue, rows: Dim | None = None) -> TensorValue:
    """Logits: float32 on a CPU; on a GPU of the activations' dtype, which MAX's product gives."""
    width, vocab = weights.config.d_model, weights.config.vocab_size
    dtype = x.dtype if weights.on.is_gpu() else DType.float32
    matrix = weights.matrix("head", width, vocab)
    return linear(x, matrix, vocab, rows=rows, out_dtype=dtype, product=weights.product)


@dataclass(frozen=True, slots=True)
class _Weights:
    """Declares the graph's weights under the names of `weights.named_tensors`."""

    config: ModelConfig
    dtype: DType
    on: DeviceRef
    product: Product | None
    prefix: str = ""
    index: int = 0
    """The number of the layer, from 0."""
    variants: Variants = NO_VARIANTS

    @property
    def pdl(self) -> bool:
        """Whether kernels start while the one before them ends."""
        return "pdl" in self.variants

    def layer(self, index: int) -> _Weights:
        return replace(self, prefix=f"{self.prefix}layers.{index}.", index=index)

    def unit(self, number: int) -> _Weights:
        return replace(self, prefix=f"{self.prefix}units.{number}.")

    def scalars(self, name: str, *shape: int) -> TensorValue:
        return self._declare(name, DType.float32, *shape)

    def table(self, name: str, *shape: int) -> TensorValue:
        dtype = DType.bfloat16 if self.dtype == FLOAT8 else self.dtype
        return self._declare(name, dtype, *shape)

    def matrix(self, name: str, rows: int, columns: int) -> TensorValue:
        return self.table(name, *linear_shape(rows, columns, self.on, self.dtype))

    def norm(self, name: str, x: TensorValue) -> TensorValue:
        weight, bias = (
            self.table(f"{name}_{part}", self.config.d_model) for part in ("weight", "bias")
        )
        return layer_norm(x, weight, bias)

    def project(
        self, name: str, x: TensorValue, columns: int, **epilogue: bool | TensorValue | None
    ) -> TensorValue:
        matrix = self.matrix(f"{name}_weight", int(x.shape[1]), columns)
        bias = self.table(f"{name}_bias", columns)
        how: dict[str, Any] = epilogue
        return linear(x, matrix, columns, product=self.product, bias=bias, **how)

    def project_normed(
        self, name: str, stream: ResidualStream, columns: int, silu: bool = False
    ) -> TensorValue:
        """The product behind a norm."""
        if stream.moments is None:
            return self.project(name, self.norm(NORMED[name], stream.values), columns, silu=silu)
        matrix = self.matrix(f"{name}_weight", self.config.d_model, columns)
        sums = self.scalars(f"{name}_columns", columns, 2)
        return multiply_normed(stream, matrix, sums, silu, self.variants)

    def project_into(self, name: str, x: TensorValue, stream: ResidualStream) -> ResidualStream:
        """The product that is added to the stream."""
        width = self.config.d_model
        if stream.moments is None:
            return ResidualStream(self.project(name, x, width, residual=stream.values))
        matrix = self.matrix(f"{name}_weight", int(x.shape[1]), width)
        bias = self.table(f"{name}_bias", width)
        return multiply_into_stream(x, matrix, bias, stream, self.variants)

    def float8(self, name: str, columns: int, depth: int) -> tuple[TensorValue, TensorValue]:
        """The weights [columns, depth] of a product in FLOAT8, and its scales and biases."""
        dtype = dtype_of_mixers(self.variants)
        weight = self._declare(f"{name}_weight", dtype, columns, depth)
        return weight, self.scalars(f"{name}_columns", columns, 2)

    def _declare(self, name: str, dtype: DType, *shape: int) -> TensorValue:
        return Weight(self.prefix + name, dtype, shape, device=self.on)


def _mix_channels(layer: _Weights, stream: ResidualStream) -> ResidualStream:
    if layer.dtype == FLOAT8:
        width, x = layer.config.d_model, stream.values
        up, down = layer.float8("up", 4 * width, width), layer.float8("down", width, 4 * width)
        divisors = layer.scalars("up_divisors", 4 * width)
        normed, scales = layer_norm_8bit(x, dtype_of_mixers(layer.variants), layer.pdl)
        inner = multiply_8bit(normed, *up, divisors, scales, layer.variants)
        return multiply_8bit_into_stream(inner, *down, x, layer.variants)
    inner = layer.project_normed("up", stream, 4 * layer.config.d_model, silu=True)
    return layer.project_into("down", inner, stream)


def _mix_tokens(layer: _Weights, stream: ResidualStream, batch: _Rows) -> ResidualStream:
    """Return the stream + the layer's units, joined as the mixer joins them."""
    config, x = layer.config, stream.values
    unit = partial(_run_unit, layer, batch)
    residual = None if config.use_projections else x
    if "mixed" in layer.variants:
        matrix = layer.matrix("proj_in_weight", config.d_model, config.d_model)
        columns = layer.scalars("proj_in_columns", config.d_model, 2)
        run = partial(multiply_and_mix, weight=matrix, columns=columns, slots=batch.slots)
        return layer.project_into("proj_out", unit(0, stream, run), stream)
    if config.use_projections:
        y = layer.project_normed("proj_in", stream, config.d_model)
    else:
        y = layer.norm("token_norm", x)
    match config.mixer:
        case "combined":  # side by side, their outputs added
            y = unit(1, y, residual=unit(0, y))
        case "expanded":  # one behind the other
            y = unit(1, unit(0, y, silu=True), residual=residual)
        case "kernel":
            weight = layer.scalars("units.0.taps", config.kernel_size, config.n_ctx)
            beta = layer.scalars("units.0.taps_beta", config.n_ctx)
            y = taps(unit(0, y), batch.positions, batch.row_offsets, weight, beta, residual=x)
        case _:
            y = unit(0, y, residual=residual)
    return (
        layer.project_into("proj_out", y, stream) if config.use_projections else ResidualStream(y)
    )


def _run_unit(
    layer: _Weights,
    batch: _Rows,
    number: int,
    x: TensorValue | ResidualStream,
    run: Callable[..., TensorValue] = mix,
    **epilogue: Any,
) -> TensorValue:
    """`run` is `mix`, or what does its work and more, and takes what `mix` takes."""
    config, weights = layer.config, layer.unit(number)
    per_position = [*PER_POSITION, *(["gamma"] if config.mixer == "diagonal" else [])]
    return run(
        batch.states,
        ops.constant(layer.index * config.units_per_layer + number, DType.int32, DeviceRef.CPU()),
        x,
        batch.read_slots,
        batch.write_slots,
        batch.positions,
        batch.row_offsets,
        **{name: weights.scalars(name, config.num_heads, config.n_ctx) for name in per_position},
        decay=weights.scalars("decay", 2, config.num_heads),
        pdl=layer.pdl,
        **epilogue,
    )
