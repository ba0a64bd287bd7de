"""Channel mixers in float8: bits against torch's, matrices against what they stand for."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from srm.engine.config import ModelConfig
from srm.engine.weights.float8 import (
    INNER,
    LARGEST,
    LARGEST_INT8,
    float8_channel_mixer,
    float8_tensors,
    from_e4m3,
    in_inner_order,
    int8_channel_mixer,
    norm_scale,
    round_e4m3,
    round_int8,
    turned,
)
from srm.engine.weights.random_model import random_tensors
from srm.engine.weights.weights import LayerWeights, fold, named_tensors

MODEL = ModelConfig(d_model=512, num_layers=1, num_heads=2, n_ctx=4, vocab_size=8)
BITS = np.arange(256, dtype=np.uint8)


def layer(spread: float = 2) -> LayerWeights:
    """Of weights with channels of any size, and one that is nothing."""
    (result,) = fold(MODEL, random_tensors(MODEL), "").layers
    sizes = np.exp(np.random.default_rng(1).normal(0, spread, 2048))
    result.up_weight[...] *= sizes.astype(np.float32)
    result.up_weight[:, 7] = result.up_bias[7] = 0
    result.down_weight[:, 9] = 0
    return result


def test_bits_are_those_of_torch() -> None:
    exact = torch.from_numpy(BITS).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(from_e4m3(BITS), exact)
    values = np.sort(exact[np.isfinite(exact)])
    ties = (values[1:] + values[:-1]) / 2
    rng = np.random.default_rng(0)
    drawn = rng.normal(0, 1, 100_000) * np.exp2(rng.uniform(-12, 6, 100_000))
    around = [np.nextafter(ties, np.float32(side)) for side in (-np.inf, np.inf)]
    given = np.concatenate([exact, ties, *around, drawn, [-0.0]]).astype(np.float32)
    reported = torch.from_numpy(given).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    is_number = np.isfinite(given)  # there are two NaN
    np.testing.assert_array_equal(round_e4m3(given)[is_number], reported[is_number])
    assert np.isnan(from_e4m3(round_e4m3(given[~is_number]))).all()


def test_what_is_too_large_is_448() -> None:
    given = np.array([449, 464.1, 1e30, np.inf, -470, -np.inf], np.float32)
    np.testing.assert_array_equal(from_e4m3(round_e4m3(given)), [LARGEST] * 4 + [-LARGEST] * 2)


@pytest.mark.parametrize(("width", "scale"), [(512, 16), (1024, 8), (4096, 4), (16_384, 2)])
def test_a_normalised_row_always_fits(width: int, scale: int) -> None:
    assert norm_scale(width) == scale and scale * width**0.5 <= LARGEST < 2 * scale * width**0.5


def test_products_are_those_of_the_layer() -> None:
    """Each rounded weight is off by 1/16 of it at most."""
    one, narrow, rng = layer(), float8_channel_mixer(layer()), np.random.default_rng(2)
    up, down = (from_e4m3(narrow[f"{name}_weight"]) for name in ("up", "down"))
    (scale, bias), divisor = narrow["up_columns"].T, narrow["up_divisors"]
    down_scale, down_bias = narrow["down_columns"].T
    normed, stored = (rng.standard_normal((5, size), np.float32) for size in (512, 2048))
    shifted, inner = normed * one.channel_norm_weight + one.channel_norm_bias, stored * divisor
    for result, exact, terms in (
        (
            (norm_scale(512) * normed) @ up.T * scale + bias,
            shifted @ one.up_weight + one.up_bias,
            np.abs(shifted) @ np.abs(one.up_weight),
        ),
        (
            stored.reshape(5, -1, 64)[..., INNER].reshape(5, -1) @ down.T * down_scale + down_bias,
            inner @ one.down_weight + one.down_bias,
            np.abs(inner) @ np.abs(one.down_weight),
        ),
    ):
        assert (np.abs(result - exact) <= terms / 16 + 1e-5).all()
        spread = np.sqrt(((result - exact) ** 2).mean() / (exact**2).mean())
        assert 0.01 < spread < 0.04


def test_an_inner_channel_always_fits() -> None:
    """Of the row that meets its column best, rounded as it is."""
    one, narrow = layer(), float8_channel_mixer(layer())
    up = from_e4m3(narrow["up_weight"])
    (scale, bias), divisor = narrow["up_columns"].T, narrow["up_divisors"]
    rows = one.channel_norm_weight[:, None] * one.up_weight
    norms = np.sqrt((rows**2).sum(axis=0))
    is_some = norms > 0
    best = np.divide(rows, norms, where=is_some, out=np.zeros_like(rows)).T * 512**0.5
    narrow_rows = from_e4m3(round_e4m3(norm_scale(512) * best))
    inner = ((narrow_rows * up).sum(axis=1) * scale + bias) / divisor
    assert inner.max() <= LARGEST and np.median(inner[is_some]) > LARGEST / 4


def test_int8_is_rounded_and_never_minus_128() -> None:
    given = np.array([-1e9, -128, -127.5, -126.5, -0.5, 0.5, 1.5, 127.4, 300])
    np.testing.assert_array_equal(round_int8(given), [-127, -127, -127, -126, 0, 0, 2, 127, 127])


def test_turning_twice_multiplies_by_16() -> None:
    x = np.random.default_rng(0).standard_normal((3, 64))
    np.testing.assert_allclose(turned(turned(x)), 16 * x)
    np.testing.assert_allclose((turned(x) ** 2).sum(1), 16 * (x**2).sum(1))
    assert np.ptp(turned(np.eye(16)[3])) == 2 and turned(np.ones(16))[0] == 16


def test_int8_products_are_those_of_the_layer() -> None:
    """What differs is the rounding of weights."""
    one, rng = layer(0), np.random.default_rng(2)
    narrow = int8_channel_mixer(one)
    (scale, bias), divisor = 2 * narrow["up_columns"].T, in_inner_order(narrow["up_divisors"])
    down_scale, down_bias = narrow["down_columns"].T
    normed = rng.standard_normal((5, 512))
    shifted = normed * one.channel_norm_weight + one.channel_norm_bias
    half = (shifted @ one.up_weight + one.up_bias) / 2
    inner = half * (1 + np.tanh(half))
    codes = turned(in_inner_order(inner)) * divisor
    for result, exact in (
        (turned(normed) @ narrow["up_weight"].T.astype(np.float64) * scale + bias,
         2 * half),
        (codes @ narrow["down_weight"].T.astype(np.float64) * down_scale + down_bias,
         inner @ one.down_weight + one.down_bias),
    ):  # fmt: skip
        spread = np.sqrt(((result - exact) ** 2).mean() / (exact**2).mean())
        assert 0.005 < spread < 0.025
    for name in ("up", "down"):
        weight = narrow[f"{name}_weight"]
        assert weight.dtype == np.int8 and weight.min() == -LARGEST_INT8
        assert (np.abs(weight).max(1) == LARGEST_INT8).sum() >= len(weight) - 1
    assert not narrow["up_weight"][7].any() and not narrow["down_weight"][9].any()


def test_int8_holds_what_noise_makes_of_a_layer() -> None:
    """With room for MARGIN times as much, but for its constant part."""
    one, narrow = layer(), int8_channel_mixer(layer())
    rows = np.random.default_rng(3).standard_normal((300, 512))
    normed = rows * one.channel_norm_weight + one.channel_norm_bias
    half = (normed @ one.up_weight + one.up_bias) / 2
    inner = half * (1 + np.tanh(half))
    codes = np.abs(turned(in_inner_order(inner)) * in_inner_order(narrow["up_divisors"])).max(0)
    assert codes.max() < LARGEST_INT8 and 0.15 < np.median(codes) / LARGEST_INT8 < 0.4


@pytest.mark.parametrize("in_int8", [False, True])
def test_all_other_tensors_stay(in_int8: bool) -> None:
    weights = fold(MODEL, random_tensors(MODEL), "")
    plain, narrow = dict(named_tensors(weights)), dict(float8_tensors(weights, in_int8))
    gone = {f"layers.0.channel_norm_{part}" for part in ("weight", "bias")}
    gone |= {f"layers.0.{name}_bias" for name in ("up", "down")}
    come = {f"layers.0.{name}" for name in ("up_columns", "up_divisors", "down_columns")}
    assert plain.keys() - narrow.keys() == gone and narrow.keys() - plain.keys() == come
    same = {name for name, value in plain.items() if narrow.get(name) is value}
    assert plain.keys() - same - gone == {f"layers.0.{name}_weight" for name in ("up", "down")}
