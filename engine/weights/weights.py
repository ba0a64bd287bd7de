"""The weights of a model in the one form that the step graph knows, whatever the mixer.

A layer has one recurrent unit, or two behind or beside each other. Every unit is

    s ← alpha_in · x + decay · s        y = alpha_out · s + gamma · x + beta

per channel, with scalars per head and position; `engine.device.model` says how a mixer joins its
units. A column unit has alpha_in = 1, a row unit alpha_out = 1. Projections of all heads become one
matrix, matrices are turned to [in, out], and decay is clipped and taken to the power 1 / c once.
Nothing is divided by a weight. Knows no files: that names and shapes are right is for `checkpoint`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

from srm.engine.config import ModelConfig
from srm.engine.steps.batch import F32
from srm.engine.weights.tensors import DECAY_RANGE, projection_prefixes, scalar_prefixes

F64 = npt.NDArray[np.float64]
Tensors = Mapping[str, F32]


@dataclass(frozen=True, slots=True, eq=False)
class MixerUnit:
    """One recurrence. H = heads, n = n_ctx, k = kernel_size; all float32."""

    alpha_in: F32  # f32[H, n]
    alpha_out: F32  # f32[H, n]
    beta: F32  # f32[H, n]
    decay: F32  # f32[2, H] rounded to float32, and what the rounding left
    gamma: F32 | None = None  # f32[H, n]
    taps: F32 | None = None  # f32[k, n] of "kernel": weights of channels j - k + 1 … j of y
    taps_beta: F32 | None = None  # f32[n] added after them


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One block. d = d_model; all float32."""

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
    units: tuple[MixerUnit, ...]
    proj_out_weight: F32 | None  # f32[d, d]
    proj_out_bias: F32 | None  # f32[d]


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """A whole model. `fingerprint` is of config and tensors, hexadecimal."""

    config: ModelConfig
    embedding: F32  # f32[V, d]
    head: F32  # f32[d, V]
    layers: tuple[LayerWeights, ...]
    fingerprint: str


def fold(config: ModelConfig, tensors: Tensors, fingerprint: str) -> Weights:
    """Make the weights of a model from all tensors of `tensors.tensor_shapes(config)`."""
    return Weights(
        config=config,
        embedding=tensors["input_layer.weight"],
        head=_turned(tensors["output_layer.weight"]),
        layers=tuple(
            _fold_layer(config, _below(tensors, f"mixer_blocks.{index}."))
            for index in range(config.num_layers)
        ),
        fingerprint=fingerprint,
    )


def named_tensors(weights: Weights) -> Iterator[tuple[str, F32]]:
    """Every tensor under the name the step graph knows it by: `layers.0.up_weight`, `head`, …;
    those of a unit are `layers.0.units.1.alpha_in`."""
    yield "embedding", weights.embedding
    yield "head", weights.head
    for index, layer in enumerate(weights.layers):
        yield from _fields(f"layers.{index}.", layer)
        for number, unit in enumerate(layer.units):
            yield from _fields(f"layers.{index}.units.{number}.", unit)


def _fields(prefix: str, record: LayerWeights | MixerUnit) -> Iterator[tuple[str, F32]]:
    for field in fields(record):
        value = getattr(record, field.name)
        if isinstance(value, np.ndarray):
            yield prefix + field.name, value


def _fold_layer(config: ModelConfig, block: Tensors) -> LayerWeights:
    mixer = _below(block, "token_mixing_layer.")
    proj_in_weight = proj_in_bias = proj_out_weight = proj_out_bias = None
    if config.use_projections:
        prefixes = projection_prefixes(config)
        proj_in_weight = _turned(np.concatenate([mixer[f"{prefix}weight"] for prefix in prefixes]))
        proj_in_bias = np.concatenate([mixer[f"{prefix}bias"] for prefix in prefixes])
        proj_out_weight = _turned(mixer["out_proj.weight"])
        proj_out_bias = mixer["out_proj.bias"]
    return LayerWeights(
        channel_norm_weight=block["channel_norm.weight"],
        channel_norm_bias=block["channel_norm.bias"],
        up_weight=_turned(block["channel_mixing_layer.0.weight"]),
        up_bias=block["channel_mixing_layer.0.bias"],
        down_weight=_turned(block["channel_mixing_layer.2.weight"]),
        down_bias=block["channel_mixing_layer.2.bias"],
        token_norm_weight=block["token_norm.weight"],
        token_norm_bias=block["token_norm.bias"],
        proj_in_weight=proj_in_weight,
        proj_in_bias=proj_in_bias,
        units=_fold_units(config, mixer),
        proj_out_weight=proj_out_weight,
        proj_out_bias=proj_out_bias,
    )


def _fold_units(config: ModelConfig, mixer: Tensors) -> tuple[MixerUnit, ...]:
    heads, n_ctx, c = config.num_heads, config.n_ctx, config.decay_constant

    def stacked(name: str) -> F32:
        return np.stack([mixer[prefix + name] for prefix in scalar_prefixes(config)])

    def alphas(stage: str = "") -> F32:  # f32[H, r, n]; r is 2 of "combined", k of "kernel", else 1
        return stacked(stage + "weight").reshape(heads, -1, n_ctx)

    def betas(stage: str = "") -> F32:  # f32[H, n]
        return stacked(stage + "bias").reshape(heads, n_ctx)

    clipped = np.ones((1, 1))  # f64[H or 1, 2 or 1]
    if config.decay:
        raw = stacked("decay_value").clip(*DECAY_RANGE).astype(np.float64)
        clipped = raw.reshape(len(raw), -1)
    decay = clipped[:, -1] ** (1 / c)  # "parallel" and "kernel" never used the first of their two
    all_rows, all_columns = 0, heads

    match config.mixer:
        case "combined":
            row_alphas, row_decay = alphas()[:, 0], clipped[:, 0] ** (1 / c)
            if config.decay and config.combined_row_quirk:
                row_alphas, row_decay = row_alphas / np.float32(c), clipped[:, 0]
            row = _unit(row_alphas, betas(), row_decay, all_rows)
            return row, _unit(alphas()[:, 1], np.zeros_like(betas()), decay, all_columns)
        case "expanded":
            return tuple(
                _unit(alphas(stage)[:, 0], betas(stage), decay, all_columns)
                for stage in ("0.", "2.")
            )
        case "kernel":
            none = np.zeros_like(betas())
            plain_sum = _unit(np.ones_like(betas()), none, decay, all_columns)
            return (replace(plain_sum, taps=alphas()[0], taps_beta=betas()[0]),)
        case "row":
            return (_unit(alphas()[:, 0], betas(), decay, all_rows),)
        case "column" | "column_heads":
            return (_unit(alphas()[:, 0], betas(), decay, all_columns),)
        case "mixed" | "parallel":
            return (_unit(alphas()[:, 0], betas(), decay, heads // 2),)
        case "diagonal":  # s holds the newest token at weight alpha; it is to have delta
            unit = _unit(alphas()[:, 0], betas(), decay, heads // 2)
            return (replace(unit, gamma=stacked("diag_weight") - alphas()[:, 0]),)


def _unit(alpha: F32, beta: F32, decay: F64, first_row: int) -> MixerUnit:
    """alpha and beta [H, n], the exact decay [H or 1]; heads from `first_row` on are row heads."""
    is_row, ones = np.arange(len(alpha))[:, None] >= first_row, np.ones_like(alpha)
    exact = np.broadcast_to(decay, len(alpha))
    rounded = exact.astype(np.float32)
    return MixerUnit(
        alpha_in=np.where(is_row, alpha, ones),
        alpha_out=np.where(is_row, ones, alpha),
        beta=beta,
        decay=np.stack([rounded, (exact - rounded).astype(np.float32)]),
    )


def _below(tensors: Tensors, prefix: str) -> dict[str, F32]:
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def _turned(weight: F32) -> F32:
    return np.ascontiguousarray(weight.T)
