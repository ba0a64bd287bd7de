"""How the kit for a GPU holds our products to float64, tried on what numpy computes."""

from __future__ import annotations

import numpy as np
import pytest

from research.bench.engine.feeds import Array, Feeds
from research.bench.gpu.ops import check_product
from srm.engine.config import ModelConfig
from srm.engine.device.linear import round_bfloat16, widen_bfloat16
from srm.engine.device.products import SLICE
from tests.kernels import oracle

MODEL = ModelConfig(d_model=512, num_layers=2, num_heads=4, n_ctx=16, vocab_size=1024)


@pytest.mark.parametrize("rows", [0, 40])
@pytest.mark.parametrize("name", ["up", "proj_out", "head"])
def test_our_products_are_held_against_float64(name: str, rows: int) -> None:
    """Computed here as our kernels do."""
    feeds, width = Feeds(MODEL, is_narrow=True, narrow_logits=True), MODEL.d_model
    weight = widen_bfloat16(feeds.weight(width, width))
    if name == "up":
        before = feeds.normed(rows, width, width)
        x, columns, moments = (
            widen_bfloat16(before[0]),
            *(array.astype(float) for array in before[1:]),
        )
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
