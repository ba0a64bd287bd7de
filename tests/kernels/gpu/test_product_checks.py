"""How a GPU's products are held to float64, tried on what numpy computes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from max.graph import DeviceRef

from research.bench.engine.feeds import Array, Feeds
from research.bench.engine.float8 import float8_ops
from research.bench.engine.ops import widened
from srm.engine.config import ModelConfig
from srm.engine.device.linear import round_bfloat16, widen_bfloat16
from srm.engine.device.products import SLICE
from srm.engine.weights.float8 import (
    INNER,
    LARGEST_INT8,
    from_e4m3,
    in_inner_order,
    norm_scale,
    round_e4m3,
    round_int8,
    turned,
)
from srm.engine.weights.random_model import random_tensors
from srm.engine.weights.weights import LayerWeights, fold
from tests.kernels import oracle
from tests.kernels.product_checks import check_float8, check_product, float8_mixer, int8_mixer
from tests.kit.engines.numpy_runner import F64, TINY, feed, in_float64, silu, tiny_weights

MODEL = ModelConfig(d_model=512, num_layers=3, num_heads=4, n_ctx=16, vocab_size=1024)
ONE_LAYER = ModelConfig(d_model=64, num_layers=1, num_heads=4, n_ctx=16, vocab_size=64)
Wrong = Callable[[F64], F64]


def in_order(y: F64) -> F64:
    """As `srm_up_e4m3` would write them that did not know INNER."""
    return y.reshape(len(y), -1, 64)[..., np.argsort(INNER)].reshape(y.shape)


WRONG: dict[str, list[Wrong]] = {
    "norm": [lambda y: y * 1.2, lambda y: y[:, ::-1]],
    "up": [lambda y: y * 1.2, lambda y: y[:, ::-1], in_order],
    "down": [lambda y: y * 1.02, lambda y: y[:, ::-1], lambda y: np.roll(y, 1, axis=0)],
}
"""What is told from rounding."""


def computed(name: str, weight: Array, before: list[Array]) -> F64:
    """What an op writes, before it is rounded."""
    if name == "norm":
        return norm_scale(MODEL.d_model) * oracle.layer_norm(widened(before[0]).astype(np.float64))
    x, (scales, bias) = from_e4m3(before[0]).astype(np.float64), before[1].T
    y: F64 = x @ from_e4m3(weight).T * scales + bias
    if name == "down":
        return y + widened(before[2])
    y = silu(y) / before[2]
    return in_inner_order(y)


@pytest.mark.parametrize("rows", [0, 40])
@pytest.mark.parametrize("name", [*WRONG])
def test_what_is_right_and_what_is_wrong_are_told_apart(name: str, rows: int) -> None:
    op = float8_ops(MODEL, DeviceRef.GPU())[name]
    before = op.feed(rows)
    weight = np.zeros(0) if op.bits is None else op.bits
    y = computed(name, weight, before)

    def error(wrong: Wrong = lambda y: y) -> float:
        written = wrong(y).astype(np.float32)
        outputs: list[Array] = [round_e4m3(written)]
        if name == "down":
            out = round_bfloat16(written)
            outputs = [out, oracle.moments(widened(out).astype(np.float64)).astype(np.float32)]
        plain = None if op.bits is None else from_e4m3(weight.T)
        result, expected, allowed = check_float8(name, plain, before, outputs)
        assert result.shape == expected.shape and (result.size > 0) == (rows > 0)
        return float((np.abs(result - expected) / allowed).max(initial=0))

    assert error() <= 1
    if rows:
        assert all(error(wrong) > 1 for wrong in WRONG[name])


INT8_WRONG: dict[str, list[Wrong]] = {
    "norm": [lambda y: y[:, ::-1], lambda y: y * 0.98, turned],
    "up": [lambda y: y.clip(-20, 20), lambda y: y[:, ::-1], in_order, lambda y: turned(y) / 16],
    "down": [lambda y: y * 1.02, lambda y: y[:, ::-1], lambda y: np.roll(y, 1, axis=0)],
}
"""The same in int8: an order, a scale, a transform or a bound that is not the kernel's."""


def computed_int8(name: str, weight: Array, before: list[Array]) -> F64:
    """What an op in int8 writes, before it is rounded; of a norm the product with its scales."""
    y: F64
    if name == "norm":
        y = turned(oracle.layer_norm(widened(before[0]).astype(np.float64)))
        return y
    scales, bias = before[1].T.astype(np.float64)
    y = before[0].astype(np.float64) @ weight.T.astype(np.float64) * scales
    if name == "down":
        y = y + bias + widened(before[2])
        return y
    inner = silu(2 * (y * before[3][:, None] + bias))
    y = turned(in_inner_order(inner)) * in_inner_order(before[2])
    return y


@pytest.mark.parametrize("rows", [0, 40])
@pytest.mark.parametrize("name", [*INT8_WRONG])
def test_what_is_wrong_in_int8_is_found(name: str, rows: int) -> None:
    op = float8_ops(MODEL, DeviceRef.GPU(), frozenset({"int8"}))[name]
    before = op.feed(rows)
    bits = np.zeros((0, 0)) if op.bits is None else op.bits
    y = computed_int8(name, bits, before)

    def error(wrong: Wrong = lambda y: y) -> float:
        written = wrong(y)
        outputs: list[Array] = [round_int8(written)]
        if name == "norm":
            scales = np.abs(written).max(1) / LARGEST_INT8
            outputs = [round_int8(written / scales[:, None]), scales.astype(np.float32)]
        if name == "down":
            out = round_bfloat16(written.astype(np.float32))
            outputs = [out, oracle.moments(widened(out).astype(np.float64)).astype(np.float32)]
        plain = None if op.bits is None else op.bits.T
        result, expected, allowed = check_float8(name, plain, before, outputs)
        assert result.shape == expected.shape and (result.size > 0) == (rows > 0)
        return float((np.abs(result - expected) / allowed).max(initial=0))

    assert error() <= 1
    if rows:
        assert all(error(wrong) > 1 for wrong in INT8_WRONG[name])


def test_a_token_passes_the_channel_mixers_that_are_given() -> None:
    weights = in_float64(tiny_weights())
    state = np.zeros(TINY.state_width)
    exact, after = feed(weights, 3, 0, state)
    silent, _ = feed(weights, 3, 0, state, mixers=[np.zeros_like] * TINY.num_layers)
    assert np.abs(silent - exact).max() > 0.01 * np.abs(exact).max() and after.any()


@pytest.mark.parametrize(
    ("mixer", "least", "most"), [(float8_mixer, 0.02, 0.06), (int8_mixer, 0.01, 0.03)]
)
def test_a_mixer_of_8_bits_is_the_layers_within_its_rounding(
    mixer: Callable[[LayerWeights], Wrong], least: float, most: float
) -> None:
    (layer,) = fold(ONE_LAYER, random_tensors(ONE_LAYER), "").layers
    wide = in_float64(layer)
    rng, off = np.random.default_rng(0), []
    mix = mixer(layer)
    for x in rng.standard_normal((8, ONE_LAYER.d_model)):
        normed = oracle.layer_norm(x[None])[0] * wide.channel_norm_weight + wide.channel_norm_bias
        exact = silu(normed @ wide.up_weight + wide.up_bias) @ wide.down_weight + wide.down_bias
        off.append(np.std(mix(x) - exact) / np.std(exact))
    assert least < np.mean(off) < most


@pytest.mark.parametrize("rows", [0, 40])
@pytest.mark.parametrize("name", ["up", "proj_out", "head"])
def test_our_products_are_held_against_float64(name: str, rows: int) -> None:
    """Computed here as our kernels do."""
    feeds, width = Feeds(MODEL, is_narrow=True, narrow_logits=True), MODEL.d_model
    weight = widen_bfloat16(feeds.weight(width, width))
    if name == "up":
        before = feeds.normed(rows, width, width)
        x = widen_bfloat16(before[0])
        columns, moments = (array.astype(float) for array in before[1:])
        mean = moments[..., 0].mean(1, keepdims=True)
        apart = SLICE * (moments[..., 0] - mean) ** 2
        variance = (moments[..., 1] + apart).sum(1, keepdims=True) / width
        y = (x @ weight - mean * columns[:, 0]) / np.sqrt(variance + 1e-5) + columns[:, 1]
        y = y / (1 + np.exp(-y))
    elif name == "head":
        before = feeds.head(rows)
        y = widen_bfloat16(before[0]) @ weight
    else:
        before = [feeds.stored(rows, width), feeds.stored(width), feeds.stored(rows, width)]
        x, bias, residual = (widen_bfloat16(array) for array in before)
        y = x @ weight + bias + residual
    out = round_bfloat16(y.astype(np.float32))
    wide, temperatures = widen_bfloat16(out).astype(np.float64), np.ones(rows)
    result = oracle.slices(wide, temperatures) if name == "head" else oracle.moments(wide)
    written = result.astype(np.float32)
    outputs: list[Array] = [out] if name == "up" else [out, written]

    def error() -> float:
        results, expected, allowed = check_product(name, weight, before, outputs)
        return float((np.abs(results - expected) / allowed).max(initial=0))

    assert error() <= 1
    outputs[-1][:1, 0] = 0x4110 if name == "up" else 9  # the bits of 9, and a mean
    assert error() > 1 or rows == 0
