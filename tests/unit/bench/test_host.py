"""The host benchmark keeps as many sequences running as it says, on a device that is counted."""

from __future__ import annotations

import time

import pytest

from bench.host.load import Load
from bench.host.simulate import SimulationConfig, Uploads, device_s_per_token
from engine.config import ModelConfig
from engine.device.gpu_steps import ALIGNMENT
from engine.steps.batch import Batch


@pytest.mark.parametrize("samples", [1, 4])
@pytest.mark.parametrize("length", [None, 12])
@pytest.mark.parametrize("rows", [64, 24])
def test_so_many_sequences_run(samples: int, length: int | None, rows: int) -> None:
    load = Load(64, rows, length, samples)
    load.run(0, 50)
    cost = load.run(0, 30, 30)
    assert cost.steps == 30
    assert 48 <= load.scheduler.table.num_owned <= 64  # those that ended are replaced a step later
    assert cost.rows == 30 * rows if length is None else cost.rows >= 0.8 * 30 * rows
    assert (cost.ended > 0) == (length is not None)
    assert cost.entry()["rows"] == cost.rows and load.bytes_per_row() > 8


def test_a_token_takes_its_products_and_its_bytes() -> None:
    model = ModelConfig(d_model=1024, num_layers=8, num_heads=4, n_ctx=512, vocab_size=8192)
    products = 160 * 1024**2 + 2 * 1024 * 8192
    state, logits = 2 * 4 * 8 * 1024, 2 * 2 * 8192
    expected = products / 790e12 + (state + logits) / 4.3e12
    assert device_s_per_token(model, 790, 4.3) == pytest.approx(expected, rel=1e-12)


def test_no_more_rows_come_back_than_the_device_had_time_for() -> None:
    load, started = Load(64, 16, 20, 4, row_s=1e-4), time.perf_counter()
    cost = load.run(0.0, 12)
    assert cost.rows > 100
    assert time.perf_counter() - started >= cost.rows * 1e-4
    assert cost.wait > 0


def test_a_step_is_launched_before_the_last_one_is_read_and_copies_take_time() -> None:
    def enqueue(batch: Batch) -> tuple[float, float]:
        enqueued.append(batch.num_decode)
        return 0.01, 1e-3

    enqueued: list[int] = []
    load, started = Load(16, 16, None, 4, enqueue=enqueue), time.perf_counter()
    cost = load.run(0.0, 5)
    assert cost.rows == sum(enqueued[:-1]) > 0  # the last one is not read yet
    assert time.perf_counter() - started >= 4 * 0.01  # tokens are read behind each launch
    uploads = Uploads(SimulationConfig(gb_per_s=1.0, launch_us=5.0, running=16))
    assert load._landing is not None
    launch_s, copy_s = uploads.enqueue(load._landing)
    assert launch_s == 5e-6
    assert 8 * 16 + 8 * 16 < copy_s * 1e9 < 8 * 16 + 8 * 16 + 13 * ALIGNMENT
