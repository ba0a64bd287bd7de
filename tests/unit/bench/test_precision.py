"""The emulation of narrow dtypes rounds where a step does, and its figures are told."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from research.bench.engine.ops import widened
from research.bench.model.narrow import (
    Float8Mixer,
    Int8,
    Int8Mixer,
    KernelInt8Mixer,
    Mixer,
    folded,
    measure_mixers,
)
from research.bench.model.precision import (
    CASES,
    Case,
    PrecisionConfig,
    RoundedModel,
    markdown,
    measure,
)
from srm.engine.config import ModelConfig
from srm.engine.device.linear import round_bfloat16
from srm.engine.weights.checkpoint import load_checkpoint
from srm.engine.weights.random_model import write_random_model
from srm.engine.weights.weights import LayerWeights
from srm.errors import ConfigError
from srm.training.checkpoint import load_model
from srm.training.huggingface.mixers_srm import Block
from tests.kit.engines.numpy_runner import F64, feed, in_float64

MODEL = ModelConfig(d_model=64, num_layers=3, num_heads=4, n_ctx=24, vocab_size=300)
IDS = np.random.default_rng(0).integers(MODEL.vocab_size, size=24)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    write_random_model(made, MODEL)
    return made


def logits(folder: Path, case: Case) -> F64:
    with torch.inference_mode():
        result: F64 = RoundedModel(folder, case)(torch.tensor(IDS)[None])[0].double().numpy()
    return result


def rounded(values: F64) -> F64:
    return widened(round_bfloat16(values.astype(np.float32))).astype(np.float64)


def test_bfloat16_rounds_as_much_as_the_oracle(folder: Path) -> None:
    weights = load_checkpoint(folder)
    narrow, states = in_float64(weights, rounded), [np.zeros(MODEL.state_width)] * 2
    emulated, exact = np.zeros((2, len(IDS), MODEL.vocab_size))
    for position, token in enumerate(IDS.tolist()):
        y, states[0] = feed(narrow, token, position, states[0], rounded)
        emulated[position] = rounded(y)
        exact[position], states[1] = feed(weights, token, position, states[1])
    error, rounding = np.abs(logits(folder, Case("bfloat16")) - exact), np.abs(emulated - exact)
    # The oracle rounds what norms give, too.
    assert 0.6 * rounding.mean() < error.mean() < rounding.mean()
    assert np.abs(logits(folder, Case("float32")) - exact).max() < 1e-5 * np.abs(exact).max()


def test_float8_is_the_channel_mixer_within_its_rounding(folder: Path) -> None:
    layer = load_checkpoint(folder).layers[0]
    block = load_model(folder).double().mixer_blocks[0]
    assert isinstance(block, Block)
    x = torch.randn(100, MODEL.d_model, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        exact = block.channel_mixing_layer(block.channel_norm(x.double()))
        results = [Float8Mixer(layer, bits).run(x).double() for bits in (24, 14, 5)]
    off = [float((item - exact).std() / exact.std()) for item in results]
    assert 0.02 < off[0] < 0.06 and abs(off[1] / off[0] - 1) < 0.05 and off[2] > 1.2 * off[0]


def test_int8_products_are_of_int8(folder: Path) -> None:
    """Of factors that int8 holds exactly, up to scales, nothing is rounded away."""
    layer = load_checkpoint(folder).layers[0]
    up, bias, down, down_bias = folded(layer, torch.float64)
    x = torch.randn(300, MODEL.d_model, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        normed = F.layer_norm(x.double(), [MODEL.d_model], eps=1e-5)
        normed, up, down = (by_rows_in_int8(item) for item in (normed, up, down))
        inner = by_rows_in_int8(F.silu(normed @ up.T + bias))
        result = Int8Mixer(layer, Int8()).run(x)
    # One unit of h, or of x, rounded to the other side is all that float32 may change.
    off = (result - (inner @ down.T + down_bias)).abs() / inner.abs().amax(1, keepdim=True)
    assert (off < 1e-5).double().mean() > 0.9 and off.max() < 0.02


def by_rows_in_int8(x: torch.Tensor) -> torch.Tensor:
    numbers = x.numpy()
    scales = np.abs(numbers).max(1, keepdims=True) / 127
    return torch.from_numpy(np.rint(numbers / scales).clip(-127, 127) * scales)


def test_transforms_help_where_channels_differ() -> None:
    """And scales that are fixed by other rows cost little."""
    ways = [Int8(), Int8(True), Int8(True, "h"), Int8(True, "hx")]
    cases: dict[str, Callable[[LayerWeights], Mixer]] = {
        str(number): partial(Int8Mixer, way=way) for number, way in enumerate(ways)
    }
    cases |= {"kernel": KernelInt8Mixer, "float8": Float8Mixer}
    with torch.inference_mode():
        gaussian, outliers = measure_mixers({}, cases)
    errors = [list(result["errors"].values()) for result in (gaussian, outliers)]
    expected = (
        [0.0187, 0.022, 0.018, 0.018, 0.025, 0.054],
        [0.031, 0.032, 0.027, 0.019, 0.026, 0.054],
    )
    np.testing.assert_allclose(errors, expected, rtol=0.1)


def test_fixed_scales_clip_what_is_larger(folder: Path) -> None:
    layer = load_checkpoint(folder).layers[0]
    x = torch.randn(100, MODEL.d_model, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        mixers = [Int8Mixer(layer, Int8(True)) for _ in range(2)]
        for mixer, seen in zip(mixers, (x, x[:1]), strict=True):
            exact = mixer.run(seen)[:1]
            mixer.fix()
            assert (mixer.run(x[:1]) - exact).abs().max() < 0.05
        alike, clipped = (mixer.run(x) for mixer in mixers)
    assert (alike - clipped).abs().max() > 0.2


def test_every_case_is_measured(tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    record = measure(PrecisionConfig(demo_model=nowhere, random_widths=(64,)))
    (model,) = record["models"]
    assert [case["case"] for case in model["cases"]] == list(CASES)
    divergences = {case["case"]: case["kl_mean"] for case in model["cases"]}
    by_loss = [divergences[name] for name in ("float32", "bfloat16", "int8", "float8")]
    assert by_loss == sorted(by_loss)
    assert by_loss[0] < 1e-9 and by_loss[1] > 1e-5
    assert sum(line.startswith("| int8") for line in markdown(record)) == 10
    assert [mixers["name"] for mixers in record["mixers"]] == ["Gaussian", "outliers"]
    with pytest.raises(ConfigError, match="nothing to do"):
        measure(PrecisionConfig(demo_model=nowhere, random_widths=()))
