"""The SRM step as one MAX graph: a ragged batch in, sampled tokens out, the state pool moved on.

Prefill rows and decode rows go through the blocks together; only the decode rows, which come first,
go through the output head and the sampler. Shapes that change from step to step (rows, tokens,
decode rows, slots) are symbolic, so one compiled graph serves every batch. Weights are bound when
the graph is initialised, not when it is compiled.
"""

from __future__ import annotations

from max.driver import Device
from max.dtype import DType
from max.graph import (
    BufferType,
    BufferValue,
    DeviceRef,
    Dim,
    Graph,
    TensorType,
    TensorValue,
    Weight,
    ops,
)

from engine.config import ModelConfig
from engine.kernels import embed, mix, sample
from engine.linear import KERNELS, layer_norm, linear, linear_shape

SAMPLING_INPUTS = {
    "temperature": DType.float32,
    "top_k": DType.int32,
    "top_p": DType.float32,
    "min_p": DType.float32,
    "seeds": DType.uint64,
}
"""One value per decode row each, in the order of the graph's inputs."""


def build_step_graph(config: ModelConfig, device: Device) -> Graph:
    """The step of a model of this shape.

    Inputs, in order: states f32[slots, L * d] and last_token i32[slots], both changed in place;
    token_ids i32[tokens], read_slots, write_slots and positions i32[rows], row_offsets
    i32[rows + 1]; then SAMPLING_INPUTS [decode]. Outputs: token_ids i32[decode], logprobs
    f32[decode]. The meaning of each is that of `engine.batch.Batch`.
    """
    on = DeviceRef.from_device(device)
    rows = [TensorType(DType.int32, ["rows"], on) for _ in ("read", "write", "positions")]
    with Graph(
        "srm_step",
        input_types=[
            BufferType(DType.float32, ["slots", config.state_width], on),
            BufferType(DType.int32, ["slots"], on),
            TensorType(DType.int32, ["tokens"], on),
            *rows,
            TensorType(DType.int32, ["row_bounds"], on),
            *(TensorType(dtype, ["decode"], on) for dtype in SAMPLING_INPUTS.values()),
        ],
        custom_extensions=[KERNELS],
    ) as graph:
        states, last_token = (value.buffer for value in graph.inputs[:2])
        tokens, read, write, positions, offsets = (value.tensor for value in graph.inputs[2:7])
        sampling = [value.tensor for value in graph.inputs[7:]]
        weights = _StepWeights(config, on)
        x = embed(last_token, tokens, read, weights.table("embedding"))
        for index in range(config.num_layers):
            layer = weights.layer(index)
            x = _mix_channels(layer, x)
            x = _mix_tokens(layer, x, states, index, read, write, positions, offsets)
        logits = linear(x, weights.head(), config.vocab_size, rows=Dim("decode"))
        sampled = sample(last_token, logits, *sampling, positions, write)
        graph.output(*sampled)
    return graph


class _StepWeights:
    """Declares the graph's weights, by the names of `checkpoint.named_tensors`."""

    def __init__(self, config: ModelConfig, on: DeviceRef, prefix: str = "") -> None:
        self.config = config
        self._on = on
        self._prefix = prefix
        self._dtype = compute_dtype(on)

    def layer(self, index: int) -> _StepWeights:
        return _StepWeights(self.config, self._on, f"layers.{index}.")

    def table(self, name: str) -> TensorValue:
        return self._weight(name, self._dtype, self.config.vocab_size, self.config.d_model)

    def head(self) -> TensorValue:
        return self.matrix("head", self.config.d_model, self.config.vocab_size)

    def matrix(self, name: str, rows: int, columns: int) -> TensorValue:
        return self._weight(name, self._dtype, *linear_shape(rows, columns, self._on))

    def vector(self, name: str, length: int) -> TensorValue:
        return self._weight(name, self._dtype, length)

    def scalars(self, name: str, *shape: int) -> TensorValue:
        """Of the mixer: always float32, since 0.999 is 1.0 in bfloat16."""
        return self._weight(name, DType.float32, *shape)

    def _weight(self, name: str, dtype: DType, *shape: int) -> TensorValue:
        return Weight(self._prefix + name, dtype, shape, device=self._on)


def compute_dtype(on: DeviceRef) -> DType:
    """Of matrices and activations: bfloat16 on a GPU, float32 on a CPU."""
    return DType.bfloat16 if on.is_gpu() else DType.float32


def _mix_channels(layer: _StepWeights, x: TensorValue) -> TensorValue:
    width = layer.config.d_model
    normed = _norm(layer, "channel_norm", x)
    up, up_bias = layer.matrix("up_weight", width, 4 * width), layer.vector("up_bias", 4 * width)
    inner = linear(normed, up, 4 * width, bias=up_bias, silu=True)
    down, down_bias = layer.matrix("down_weight", 4 * width, width), layer.vector("down_bias", width)
    return linear(inner, down, width, bias=down_bias, residual=x)


def _mix_tokens(
    layer: _StepWeights,
    x: TensorValue,
    states: BufferValue,
    index: int,
    read: TensorValue,
    write: TensorValue,
    positions: TensorValue,
    offsets: TensorValue,
) -> TensorValue:
    config = layer.config
    width, per_position = config.d_model, (config.num_heads, config.n_ctx)
    scalars = [layer.scalars(name, *per_position) for name in ("alpha_in", "alpha_out", "beta")]
    decay = layer.scalars("decay", config.num_heads)
    number = ops.constant(index, DType.int32, DeviceRef.CPU())
    where = (read, write, positions, offsets)
    normed = _norm(layer, "token_norm", x)
    if not config.use_projections:
        return mix(states, number, normed, *where, *scalars, decay, residual=x)
    into, into_bias = layer.matrix("proj_in_weight", width, width), layer.vector("proj_in_bias", width)
    mixed = mix(
        states, number, linear(normed, into, width, bias=into_bias), *where, *scalars, decay
    )
    out, out_bias = layer.matrix("proj_out_weight", width, width), layer.vector("proj_out_bias", width)
    return linear(mixed, out, width, bias=out_bias, residual=x)


def _norm(layer: _StepWeights, name: str, x: TensorValue) -> TensorValue:
    width = layer.config.d_model
    return layer_norm(x, layer.vector(name + "_weight", width), layer.vector(name + "_bias", width))
