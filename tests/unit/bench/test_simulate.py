"""The simulated device takes the time that was counted for it, and no less."""

from __future__ import annotations

import time

import pytest

from bench.host.simulate import PacedLoad, device_s_per_token
from engine.config import ModelConfig


def test_a_token_takes_its_products_and_its_bytes() -> None:
    model = ModelConfig(d_model=1024, num_layers=8, num_heads=4, n_ctx=512, vocab_size=8192)
    products = 160 * 1024**2 + 2 * 1024 * 8192
    state, logits = 2 * 4 * 8 * 1024, 2 * 2 * 8192
    expected = products / 790e12 + (state + logits) / 4.3e12
    assert device_s_per_token(model, 790, 4.3) == pytest.approx(expected, rel=1e-12)


def test_no_more_rows_come_back_than_the_device_had_time_for() -> None:
    row_s = 1e-4
    paced = PacedLoad(row_s, running=64, rows=16, length=20, samples=4)
    started = time.perf_counter()
    cost = paced.run(0.0, 12)
    assert cost.rows > 100
    assert time.perf_counter() - started >= cost.rows * row_s
    assert cost.wait > 0
