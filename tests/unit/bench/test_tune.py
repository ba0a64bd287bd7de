"""`srm tune`: what it makes of measurements, and that the engine takes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec
import numpy as np
import pytest
from max.driver import Device, accelerator_count
from max.dtype import DType

from research.bench.engine import tune
from research.bench.engine.feeds import Array, Feeds
from research.bench.gpu.ops import check_product
from srm.engine.config import ModelConfig
from srm.engine.device.graph_cache import choice_path, measured_product
from srm.engine.device.linear import round_bfloat16, widen_bfloat16
from srm.engine.device.products import SLICE, Product, choose_product
from srm.engine.weights.random_model import write_random_model
from srm.errors import ConfigError, SRMError
from tests.kernels import oracle

MODEL = ModelConfig(d_model=512, num_layers=2, num_heads=4, n_ctx=16, vocab_size=1024)
ROWS = (64, 4096)
Found = list[dict[str, Any]] | str


class Gpu(NamedTuple):
    """A GPU as far as it is asked."""

    model_name: str = "NVIDIA H200"
    architecture_name: str = "sm_90a"
    label: str = "gpu"
    is_host: bool = False


H200 = cast(Device, Gpu())


def lines(few: float, many: float, *, norm: bool = True, **wrong: float) -> list[dict[str, Any]]:
    """Every op takes so long with few rows and with many; `wrong` are errors of ops."""
    return [
        {"op": op, "rows": rows, "seconds": seconds, "error": error, "ok": error <= 1}
        for op in tune.ops_of(MODEL)
        if op != "norm" or norm
        for rows, seconds in zip(ROWS, (few, many), strict=True)
        for error in [wrong.get(op, 0.1)]
    ]


def test_the_fastest_of_those_that_are_right_is_chosen() -> None:
    entries: dict[Product, Found] = {
        "own": lines(2.0, 4.0, norm=False, down=1.5),
        "linalg": lines(1.0, 9.0),
        "plain": lines(4.0, 2.0),
    }
    choice = tune.choose(MODEL, ROWS, entries)
    assert choice.product == "plain"
    calls = 2 * (2 + 4) + 1  # of each layer two norms and four products, and a head
    assert choice.seconds == {
        "linalg": {64: calls, 4096: 9 * calls},
        "plain": {64: 4 * calls, 4096: 2 * calls},
    }
    assert choice.left_out == {"own": "down of 64 rows is off 1.5 times as far as it may"}
    entries["own"] = lines(2.0, 4.0, norm=False)  # as the others, but without norms
    assert tune.choose(MODEL, ROWS, entries).product == "own"
    assert "| linalg | 13000.000 ms | 117000.000 ms |  |" in tune.shown(choice)


def test_one_that_came_to_no_end_is_left_out() -> None:
    choice = tune.choose(MODEL, ROWS, {"own": "it did not end", "plain": lines(1.0, 1.0)})
    assert choice.product == "plain" and choice.left_out == {"own": "it did not end"}
    with pytest.raises(SRMError, match="no product is right on this GPU: own: it did not end"):
        tune.choose(MODEL, ROWS, {"own": "it did not end"})
    nan = lines(1.0, 1.0, head=float("nan"))
    with pytest.raises(SRMError, match="head of 64 rows is off nan"):
        tune.choose(MODEL, ROWS, {"plain": nan})


def test_a_model_without_projections_has_fewer_products() -> None:
    plain = tune.ops_of(msgspec.structs.replace(MODEL, use_projections=False))
    assert plain == {"norm": 4, "up": 2, "down": 2, "head": 1}


def test_the_engine_takes_what_was_found_for_this_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    times: dict[Product, Found] = {"own": lines(2, 2), "linalg": lines(1, 1), "plain": "it crashed"}
    monkeypatch.setattr(tune, "accelerator_count", lambda: 1)
    monkeypatch.setattr(tune, "open_device", lambda kind: H200)
    monkeypatch.setattr(tune, "measure", lambda product, *_: times[product])
    write_random_model(tmp_path / "model", MODEL)
    settings = [f"--model={tmp_path / 'model'}", f"--cache-dir={tmp_path}", "--rows=64,4096"]
    assert tune.main(settings) == 0
    out = capsys.readouterr().out
    assert "| plain |  |  | it crashed |" in out and "product = auto takes linalg" in out

    of = MODEL, DType.bfloat16
    assert measured_product(*of, H200, tmp_path) == "linalg"
    for measured, product in (("linalg", "linalg"), ("plain", "plain"), (None, "own")):
        assert choose_product("auto", *of, H200, cast(Product | None, measured)) == product
    assert choose_product("own", *of, H200, "linalg") == "own"

    other = cast(Device, Gpu("NVIDIA H100"))
    deeper = msgspec.structs.replace(MODEL, num_layers=3)
    assert measured_product(*of, other, tmp_path) is None
    assert measured_product(deeper, DType.bfloat16, H200, tmp_path) is None
    choice_path(*of, H200, tmp_path).write_bytes(b'{"product": "fast"}')
    with pytest.raises(ConfigError, match="delete it, or run srm tune again"):
        measured_product(*of, H200, tmp_path)


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


@pytest.mark.skipif(accelerator_count() > 0, reason="is of a machine without a GPU")
def test_without_a_gpu_one_line_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="device = gpu: MAX finds no GPU here"):
        tune.main([])
    why = tune.measure("own", MODEL, tune.TuneConfig(), tmp_path)
    assert isinstance(why, str) and "device = gpu: MAX finds no GPU here" in why
