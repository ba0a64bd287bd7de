"""The channel mixer of a model in float8 (e4m3) or int8, as an H100 or H200 multiplies it.

e4m3 has three bits behind the leading one from 2^-6 up to 448, and fewer down to 2^-9. Both factors
of a product are rounded to it. A scale has to bring values into that range and no more, so those of
activations are powers of two that follow from the weights, and no row is measured:

- A normalised row has a norm of sqrt(d) at most (`norm_scale`); gain and shift are moved into `up`.
- So no inner channel exceeds sqrt(d) times the norm of its column of `up`, and its bias. What it is
  divided by takes that to 448 at most, and `down` multiplies: nothing is ever clipped.
- An output of a matrix has a float32 scale, by which its largest weight is 448.

An inner activation, between `up` and `down`, has its channels in the order INNER of each 64, which
is how the threads of a tensor core hold them; the rows of `down` have it too.

In int8 both activations are Hadamard transforms of each 16 neighbours, in that order, which weights
undo (QuaRot, arXiv 2404.00456). A normalised row has a scale of its own. Those of inner channels
are fixed by what rows of Gaussian noise make of them. MARGIN times as much is the largest int8, and
what exceeds it counts as that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from srm.engine.steps.batch import F32
from srm.engine.weights.weights import LayerWeights, Weights, named_tensors

Array = npt.NDArray[Any]
U8 = npt.NDArray[np.uint8]
I8 = npt.NDArray[np.int8]

LARGEST = 448.0
"""Largest value of e4m3."""
SMALLEST_NORMAL = 2.0**-6
LARGEST_INT8 = 127
"""Largest code; its negative is the smallest."""
TURNED = 16
"""Neighbours of which a Hadamard transform is."""
DRAWN, MARGIN = 1024, 2.5
"""Rows of noise that fix int8's scales of inner channels, and what their largest values lack."""
INNER = np.arange(64).reshape(8, 4, 2).transpose(1, 0, 2).ravel()
"""Index of the channel, of 64, that lies at each place."""
CHANNEL_MIXER = {
    f"{name}_{part}" for name in ("channel_norm", "up", "down") for part in ("weight", "bias")
}
"""Names of a layer that `float8_tensors` has otherwise or not at all."""


def round_e4m3(values: Array) -> U8:
    """Return the bits of the nearest e4m3, ties to even; of larger values those of 448."""
    clipped = np.clip(values, -LARGEST, LARGEST)
    bits = np.ascontiguousarray(clipped, np.float32).view(np.uint32)
    normal = (bits & 0x7FFFFFFF) + 0x7FFFF + (bits >> 20 & 1)  # keeps three bits of 23
    small = np.abs(clipped) < SMALLEST_NORMAL  # multiples of 2^-9, and their bits are the multiple
    tiny = np.rint(np.abs(np.where(small, clipped, 0)) * 2**9)
    codes = np.where(small, tiny, (normal >> 20) - (120 << 3)).astype(np.uint8)
    return np.where(np.isnan(values), 0x7F, codes | (bits >> 24 & 0x80)).astype(np.uint8)


def from_e4m3(bits: Array) -> F32:
    """Return the values that bits mean."""
    every = np.arange(256, dtype=np.uint8)
    exponent, fraction = every >> 3 & 15, (every & 7).astype(np.float32)
    magnitude = np.where(
        exponent > 0, np.ldexp(8 + fraction, exponent.astype(np.int32) - 10), fraction * 2**-9
    )
    magnitude[[0x7F, 0xFF]] = np.nan
    decoded: F32 = np.where(every < 128, magnitude, -magnitude).astype(np.float32)[bits]
    return decoded


def in_inner_order(values: Array, order: npt.NDArray[np.int64] = INNER) -> Array:
    """Return inner channels, the last axis, in the order that they are stored in, or another."""
    size = len(order)
    groups = values.reshape(*values.shape[:-1], values.shape[-1] // size, size)
    return groups[..., order].reshape(values.shape)


def turned(values: Array) -> Array:
    """Return the Hadamard transforms of each 16 of the last axis, whose vectors are 4 times as long
    as those of values. A transform of a transform is 16 times the values."""
    signs = np.ones((1, 1), np.float32)
    while len(signs) < TURNED:
        signs = np.block([[signs, signs], [signs, -signs]])
    return (values.reshape(-1, TURNED) @ signs).reshape(values.shape)


def round_int8(values: Array) -> I8:
    """Return the nearest int8, ties to even, from -127 to 127."""
    return np.rint(values).clip(-LARGEST_INT8, LARGEST_INT8).astype(np.int8)


def norm_scale(width: int) -> int:
    """Return what normalised rows are multiplied with: a power of two, for sqrt(width) to fit."""
    return 1 << int(math.log2(LARGEST / math.sqrt(width)))


def float8_tensors(weights: Weights, in_int8: bool = False) -> Iterator[tuple[str, Array]]:
    """Every tensor as `named_tensors` has it, but those of channel mixers as `srm_up_8bit` and
    `srm_down_8bit` want them: `<name>_weight` bits or int8 [out, in], `<name>_columns` f32[out, 2]
    scales and biases, and `up_divisors`."""
    mixer = int8_channel_mixer if in_int8 else float8_channel_mixer
    for name, value in named_tensors(weights):
        if name.rpartition(".")[2] not in CHANNEL_MIXER:
            yield name, value
    for index, layer in enumerate(weights.layers):
        for name, narrow in mixer(layer).items():
            yield f"layers.{index}.{name}", narrow


def float8_channel_mixer(layer: LayerWeights) -> dict[str, Array]:
    """The tensors of one layer's channel mixer."""
    width = len(layer.channel_norm_weight)
    up, up_bias = folded_up(layer)
    # The norm of a rounded column, times that of a rounded row, exceeds theirs by 1/16 each.
    bound = 1.13 * math.sqrt(width) * np.sqrt((up**2).sum(axis=1)) + np.abs(up_bias)
    divisor = np.exp2(np.ceil(np.log2(np.maximum(bound, 1e-30) / LARGEST))).astype(np.float32)
    up_scale = _scales(up, LARGEST)
    down = in_inner_order(np.ascontiguousarray((divisor[:, None] * layer.down_weight).T))
    down_scale = _scales(down, LARGEST)
    return {
        "up_weight": round_e4m3(up / up_scale[:, None]),
        "up_columns": np.stack([up_scale / np.float32(norm_scale(width)), up_bias], axis=1),
        "up_divisors": divisor,
        "down_weight": round_e4m3(down / down_scale[:, None]),
        "down_columns": np.stack([down_scale, layer.down_bias], axis=1),
    }


def int8_channel_mixer(layer: LayerWeights) -> dict[str, Array]:
    """The tensors of one layer's channel mixer in int8. `up_columns` are halves, as SiLU by a
    tangent wants them, and `up_divisors` reciprocals, those of transforms, at the places of the
    channels that lie where they do."""
    matrix, up_bias = folded_up(layer)
    # Random weights are drawn from small seeds: the same numbers would meet their columns best.
    noise = np.random.default_rng(240_400_456).standard_normal((DRAWN, len(matrix[0])), np.float32)
    half = (noise @ matrix.T + up_bias) / 2
    inner = in_inner_order(half * (1 + np.tanh(half)))
    largest = np.maximum(MARGIN * np.abs(turned(inner)).max(axis=0), 1e-30) / LARGEST_INT8
    up = turned(matrix) / TURNED
    down = in_inner_order(np.ascontiguousarray(layer.down_weight.T))
    down = turned(down) * largest / TURNED
    up_scale, down_scale = _scales(up, LARGEST_INT8), _scales(down, LARGEST_INT8)
    return {
        "up_weight": round_int8(up / up_scale[:, None]),
        "up_columns": np.stack([up_scale, up_bias], axis=1) / 2,
        "up_divisors": in_inner_order(1 / largest, np.argsort(INNER)).astype(np.float32),
        "down_weight": round_int8(down / down_scale[:, None]),
        "down_columns": np.stack([down_scale, layer.down_bias], axis=1),
    }


def folded_up(layer: LayerWeights) -> tuple[F32, F32]:
    """Return `up` [out, in] with the norm's gain, and its bias with the shift."""
    up = np.ascontiguousarray((layer.channel_norm_weight[:, None] * layer.up_weight).T)
    return up, layer.channel_norm_bias @ layer.up_weight + layer.up_bias


def _scales(matrix: Array, most: float) -> F32:
    """Return for each row its largest value divided by the largest code."""
    largest = np.abs(matrix).max(axis=1)
    scale: F32 = (np.where(largest > 0, largest, 1) / np.float32(most)).astype(np.float32)
    return scale
