"""Read a checkpoint folder into validated float32 weights, in the forms the step graph wants.

Folds what the mixer can: projections of all heads become one matrix, decay is clipped and taken to
the power 1 / c once, and column and row heads become one form with two scalars per position,
s ← alpha_in · x + decay · s and y = alpha_out · s + beta, where one of the alphas is all ones.
Matrices are turned to [in, out]. Whatever is wrong with a file is a CheckpointError that names it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import safetensors

from engine.batch import F32
from engine.config import ModelConfig
from engine.errors import CheckpointError

DECAY_RANGE = (0.9, 1.0)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One block. d = d_model, H = heads, n = n_ctx; all float32."""

    channel_norm_weight: F32  # f32[d]
    channel_norm_bias: F32  # f32[d]
    up_weight: F32  # f32[d, 4d]
    up_bias: F32  # f32[4d]
    down_weight: F32  # f32[4d, d]
    down_bias: F32  # f32[d]
    token_norm_weight: F32  # f32[d]
    token_norm_bias: F32  # f32[d]
    proj_in_weight: F32 | None  # f32[d, d]
    proj_in_bias: F32 | None  # f32[d]
    alpha_in: F32  # f32[H, n]
    alpha_out: F32  # f32[H, n]
    beta: F32  # f32[H, n]
    decay: F32  # f32[H]
    proj_out_weight: F32 | None  # f32[d, d]
    proj_out_bias: F32 | None  # f32[d]


@dataclass(frozen=True, slots=True)
class Weights:
    """A whole model. `fingerprint` is of config and tensors, hexadecimal."""

    config: ModelConfig
    embedding: F32  # f32[V, d]
    head: F32  # f32[d, V]
    layers: tuple[LayerWeights, ...]
    fingerprint: str


def load_checkpoint(folder: Path) -> Weights:
    """The weights in `folder` (`config.json`, `model.safetensors`).

    Raises CheckpointError naming the file, and the field or tensor, that is missing, unknown, of
    the wrong shape or not finite.
    """
    config_path, tensor_path = folder / "config.json", folder / "model.safetensors"
    config_bytes, tensor_bytes = _read(config_path), _read(tensor_path)
    try:
        config = msgspec.json.decode(config_bytes, type=ModelConfig)
    except msgspec.DecodeError as error:
        raise CheckpointError(f"{config_path}: {error}") from None
    tensors = _Tensors(tensor_path, tensor_bytes)
    width, vocab = config.d_model, config.vocab_size
    weights = Weights(
        config=config,
        embedding=tensors.take("input_layer.weight", vocab, width),
        layers=tuple(_layer(tensors, config, i) for i in range(config.num_layers)),
        head=_transposed(tensors.take("output_layer.weight", vocab, width)),
        fingerprint=hashlib.sha256(config_bytes + tensor_bytes).hexdigest()[:16],
    )
    tensors.refuse_rest()
    return weights


def _layer(tensors: _Tensors, config: ModelConfig, index: int) -> LayerWeights:
    prefix, width = f"mixer_blocks.{index}.", config.d_model
    mixer, heads = prefix + "token_mixing_layer.", range(config.num_heads)
    channel = prefix + "channel_mixing_layer."
    proj_in_weight = proj_in_bias = proj_out_weight = proj_out_bias = None
    if config.use_projections:
        head = (config.head_dim, width)
        proj_in = [tensors.take(f"{mixer}proj_head.{h}.weight", *head) for h in heads]
        proj_in_weight = _transposed(np.concatenate(proj_in))
        proj_in_bias = np.concatenate(
            [tensors.take(f"{mixer}proj_head.{h}.bias", config.head_dim) for h in heads]
        )
        proj_out_weight = _transposed(tensors.take(f"{mixer}out_proj.weight", width, width))
        proj_out_bias = tensors.take(f"{mixer}out_proj.bias", width)
    alpha_in, alpha_out, beta, decay = _mixer_scalars(tensors, config, mixer)
    return LayerWeights(
        channel_norm_weight=tensors.take(prefix + "channel_norm.weight", width),
        channel_norm_bias=tensors.take(prefix + "channel_norm.bias", width),
        up_weight=_transposed(tensors.take(channel + "0.weight", 4 * width, width)),
        up_bias=tensors.take(channel + "0.bias", 4 * width),
        down_weight=_transposed(tensors.take(channel + "2.weight", width, 4 * width)),
        down_bias=tensors.take(channel + "2.bias", width),
        token_norm_weight=tensors.take(prefix + "token_norm.weight", width),
        token_norm_bias=tensors.take(prefix + "token_norm.bias", width),
        proj_in_weight=proj_in_weight,
        proj_in_bias=proj_in_bias,
        alpha_in=alpha_in,
        alpha_out=alpha_out,
        beta=beta,
        decay=decay,
        proj_out_weight=proj_out_weight,
        proj_out_bias=proj_out_bias,
    )


def _mixer_scalars(tensors: _Tensors, config: ModelConfig, mixer: str) -> tuple[F32, ...]:
    """alpha_in, alpha_out, beta [H, n] and decay [H]; the first half of the heads are columns."""
    heads, n_ctx = range(config.num_heads), config.n_ctx
    alpha = np.concatenate(
        [tensors.take(f"{mixer}mixer_heads.{h}.weight", 1, n_ctx) for h in heads]
    )
    beta = np.stack([tensors.take(f"{mixer}mixer_heads.{h}.bias", n_ctx) for h in heads])
    decay = np.ones(config.num_heads)
    if config.decay:
        raw = [tensors.take(f"{mixer}mixer_heads.{h}.decay_value", 1) for h in heads]
        clipped = np.concatenate(raw).astype(np.float64).clip(*DECAY_RANGE)
        decay = clipped ** (1 / config.decay_constant)
    is_column = np.arange(config.num_heads)[:, None] < config.num_heads // 2
    ones = np.ones_like(alpha)
    alpha_in, alpha_out = np.where(is_column, ones, alpha), np.where(is_column, alpha, ones)
    return alpha_in, alpha_out, beta, decay.astype(np.float32)


class _Tensors:
    """The tensors of one file, each taken once."""

    def __init__(self, path: Path, content: bytes) -> None:
        self._path = path
        try:
            self._left = dict(safetensors.deserialize(content))  # type: ignore[no-untyped-call]
        except safetensors.SafetensorError as error:
            raise CheckpointError(f"{path} is not a whole safetensors file: {error}") from None

    def take(self, name: str, *shape: int) -> F32:
        """The tensor as float32 [*shape]; CheckpointError if it is not there or not so shaped."""
        found = self._left.pop(name, None)
        if found is None:
            raise CheckpointError(f"{self._path}: tensor {name} {list(shape)} is missing")
        if tuple(found["shape"]) != shape:
            raise CheckpointError(
                f"{self._path}: tensor {name} has shape {found['shape']}, "
                f"but config.json asks for {list(shape)}"
            )
        values = self._as_float32(name, found["dtype"], found["data"]).reshape(shape)
        if not np.isfinite(values).all():
            raise CheckpointError(f"{self._path}: tensor {name} has values that are not finite")
        return values

    def refuse_rest(self) -> None:
        """CheckpointError if a tensor was not taken: a model we would compute wrongly."""
        if self._left:
            names = ", ".join(sorted(self._left)[:5])
            raise CheckpointError(
                f"{self._path}: {len(self._left)} tensors do not belong to this model: {names}"
            )

    def _as_float32(self, name: str, dtype: str, data: bytes) -> F32:
        if dtype == "F32":
            return np.frombuffer(data, np.float32)
        if dtype == "F16":
            return np.frombuffer(data, np.float16).astype(np.float32)
        if dtype == "BF16":  # the upper half of a float32
            return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
        raise CheckpointError(
            f"{self._path}: tensor {name} is {dtype}; F32, F16 and BF16 can be read"
        )


def _transposed(weight: F32) -> F32:
    return np.ascontiguousarray(weight.T)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None


def named_tensors(weights: Weights) -> Iterator[tuple[str, F32]]:
    """Every tensor under the name the step graph knows it by: `layers.0.up_weight`, `head`, …"""
    yield "embedding", weights.embedding
    for index, layer in enumerate(weights.layers):
        for field in LayerWeights.__dataclass_fields__:
            value = getattr(layer, field)
            if value is not None:
                yield f"layers.{index}.{field}", value
    yield "head", weights.head
