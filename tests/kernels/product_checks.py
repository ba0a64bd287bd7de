"""How far rounding may move what a GPU's products give from float64, and float8 in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt

from research.bench.engine.feeds import Array
from research.bench.engine.ops import widened
from srm.engine.weights.float8 import (
    LARGEST_INT8,
    TURNED,
    float8_channel_mixer,
    from_e4m3,
    in_inner_order,
    int8_channel_mixer,
    norm_scale,
    round_e4m3,
    round_int8,
    turned,
)
from srm.engine.weights.weights import LayerWeights
from tests.kernels import oracle
from tests.kit.engines.numpy_runner import F64, silu

Compared = tuple[F64, F64, F64]
"""An op's output, the expected output, and how far rounding may move one from the other."""

RESIDUAL = {"down", "proj_out"}
"""Products that a residual is added to."""
LOST_OF_SUMS = 2.0**-11
"""Largest error of a product in FLOAT8, as a part of the magnitudes that are summed: tensor cores
are said to keep 14 bits of a sum, and K is 4,096."""
LOOKED_AT = 24
"""Rows that are compared."""


def looked_at(rows: int) -> npt.NDArray[np.int64]:
    """Return the rows to compare, ascending: all of a few, of more the edges and some between."""
    drawn = np.random.default_rng(rows).integers(0, max(rows, 1), LOOKED_AT)
    edges = [row for row in (0, 1, rows - 2, rows - 1) if 0 <= row < rows]
    return np.unique([*edges, *(drawn if rows else [])]).astype(np.int64)


def _wide(values: Array) -> F64:
    return widened(values).astype(np.float64)


def _rounding(values: Array, *magnitudes: F64) -> F64:
    """Return what rounding to the values' dtype after each of these intermediates may change."""
    step = 2.0**-8 if values.dtype == np.uint16 else 2.0**-23
    total: F64 = np.abs(np.stack(magnitudes)).sum(0)
    return 1e-6 + step * total


def check_product(name: str, weight: Array, before: list[Array], outputs: list[Array]) -> Compared:
    """Every column of some rows. A library may round after each part of the epilogue."""
    rows = looked_at(len(before[0]))
    x, wide = _wide(before[0][rows]), weight.astype(np.float64)
    bias = np.zeros(1) if name == "head" else _wide(before[1])
    if bias.ndim == 2:  # a folded norm's columns: sums, and biases
        x, bias = oracle.layer_norm(x), bias[:, 1]
    y = x @ wide
    seen = [y]
    if name != "head":
        seen.append(y := y + bias)
    if name == "up":
        seen.append(y := y / (1 + np.exp(-y)))
    if name in RESIDUAL:
        seen.append(y := y + _wide(before[2][rows]))
    sums = np.abs(x) @ np.abs(wide)  # in float32, in any order
    allowed = 1.2 * _rounding(outputs[0], *seen) + 2e-6 * sums
    values = _wide(outputs[0][rows]), y, allowed
    if name == "head":  # at temperature 1
        slices = partial(oracle.slices, temperatures=np.ones(len(rows)))
        return _with_moments(values, outputs, rows, slices)
    return _with_moments(values, outputs, rows)


def _with_moments(
    values: Compared,
    outputs: list[Array],
    rows: npt.NDArray[np.int64],
    moments_of: Callable[[F64], F64] = oracle.moments,
) -> Compared:
    """Add the moments of these rows of the first output, where they are the second."""
    if len(outputs) == 1:
        return values
    expected = moments_of(_wide(outputs[0][rows]))
    moments = outputs[1][rows].astype(np.float64), expected, 1e-5 * np.abs(expected) + 1e-6
    pairs = zip(values, moments, strict=True)
    y, wanted, allowed = (np.concatenate([a.ravel(), b.ravel()]) for a, b in pairs)
    return y, wanted, allowed


def check_float8(
    name: str, weight: Array | None, before: list[Array], outputs: list[Array]
) -> Compared:
    """The ops of `research.bench.engine.float8`: a norm has no weight, "up" writes INNER of each
    64."""
    rows = looked_at(len(before[0]))
    if np.int8 in {before[0].dtype.type, outputs[0].dtype.type}:
        return _check_int8(name, weight, before, outputs, rows)
    if weight is None:
        x = _wide(before[0][rows])
        y = norm_scale(x.shape[1]) * oracle.layer_norm(x)
        return from_e4m3(outputs[0][rows]).astype(np.float64), y, 1e-4 + _rounding_e4m3(y)
    x, wide = (array.astype(np.float64) for array in (from_e4m3(before[0][rows]), weight))
    scales, bias = before[1].T.astype(np.float64)
    y = x @ wide * scales + bias
    lost = LOST_OF_SUMS * (np.abs(x) @ np.abs(wide)) * scales
    if name == "down":
        y += _wide(before[2][rows])
        allowed = 1.2 * _rounding(outputs[0], y) + lost
        return _with_moments((_wide(outputs[0][rows]), y, allowed), outputs, rows)
    y, lost = y / (1 + np.exp(-y)) / before[2], 1.1 * lost / before[2]  # SiLU's slope, at most
    y, lost = in_inner_order(y), in_inner_order(lost)
    return from_e4m3(outputs[0][rows]).astype(np.float64), y, 1e-4 + _rounding_e4m3(y) + lost


def _check_int8(
    name: str,
    weight: Array | None,
    before: list[Array],
    outputs: list[Array],
    rows: npt.NDArray[np.int64],
) -> Compared:
    """The same ops of int8, whose sums are exact."""
    y: F64
    if weight is None:
        y = turned(oracle.layer_norm(_wide(before[0][rows])))
        scales, largest = outputs[1][rows].astype(np.float64), np.abs(y).max(axis=1) / LARGEST_INT8
        held = outputs[0][rows] * scales[:, None]
        allowed = np.broadcast_to(0.501 * largest[:, None], y.shape)
        pairs = (held, scales), (y, largest), (allowed, 1e-4 * largest)
        result, expected, most = (np.concatenate([a.ravel(), b]) for a, b in pairs)
        return result, expected, most
    scales, bias = before[1].T.astype(np.float64)
    y = before[0][rows].astype(np.float64) @ weight.astype(np.float64) * scales
    if name == "down":
        y += bias + _wide(before[2][rows])
        values = _wide(outputs[0][rows]), y, 1.2 * _rounding(outputs[0], y)
        return _with_moments(values, outputs, rows)
    y = 2 * (y * before[3][rows, None] + bias)
    return outputs[0][rows].astype(np.float64), *int8_inner(y, before[2])


def int8_inner(y: F64, divisors: Array) -> tuple[F64, F64]:
    """Return the int8 that inner channels become, not rounded, and how far what is written may be
    off: by rounding, by a tangent that is right to 2^-11, and by float32."""
    by = in_inner_order(divisors.astype(np.float64))
    inner, lost = (in_inner_order(values) for values in (silu(y), y / 2 * np.tanh(y / 2) * 2**-11))
    lost = lost + 1e-6 * np.abs(inner)
    of_all = (
        lost.reshape(*y.shape[:-1], y.shape[-1] // TURNED, TURNED).sum(-1).repeat(TURNED, axis=-1)
    )
    codes: F64 = (turned(inner) * by).clip(-LARGEST_INT8, LARGEST_INT8)
    return codes, 0.501 + by * of_all


def _rounding_e4m3(values: F64) -> F64:
    """Return what rounding to e4m3 may change: half of its steps."""
    steps: F64 = 2.0**-4 * np.abs(values) + 2.0**-10
    return steps


def int8_mixer(layer: LayerWeights) -> Callable[[F64], F64]:
    """Return what a layer's channel mixer in int8 adds to a token."""
    tensors = {name: value.astype(np.float64) for name, value in int8_channel_mixer(layer).items()}
    up_scale, up_bias = 2 * tensors["up_columns"].T
    down_scale, down_bias = tensors["down_columns"].T

    def mix(x: F64) -> F64:
        normed = turned(oracle.layer_norm(x[None])[0])
        scale = np.abs(normed).max() / LARGEST_INT8
        codes = round_int8(normed / scale)
        inner = tensors["up_weight"] @ codes * scale * up_scale + up_bias
        stored = round_int8(int8_inner(inner, tensors["up_divisors"])[0])
        y: F64 = tensors["down_weight"] @ stored * down_scale + down_bias
        return y

    return mix


def float8_mixer(layer: LayerWeights) -> Callable[[F64], F64]:
    """Return what a layer's channel mixer in float8 adds to a token, but for what sums lack."""
    tensors = float8_channel_mixer(layer)
    up, down = (from_e4m3(tensors[f"{name}_weight"]).astype(np.float64) for name in ("up", "down"))
    up_scale, up_bias = tensors["up_columns"].T
    down_scale, down_bias = tensors["down_columns"].T
    by = norm_scale(up.shape[1])

    def mix(x: F64) -> F64:
        normed = from_e4m3(round_e4m3(by * oracle.layer_norm(x[None])[0]))
        inner = silu(up @ normed * up_scale + up_bias) / tensors["up_divisors"]
        stored = from_e4m3(round_e4m3(in_inner_order(inner)))
        y: F64 = down @ stored * down_scale + down_bias
        return y

    return mix
