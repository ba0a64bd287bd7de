"""What tolerances of `tests/property/test_variants_served.py`, of every mixer, do not see."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from srm.engine.config import ModelConfig
from srm.engine.steps.batch import F32
from srm.engine.weights.random_model import random_tensors
from srm.engine.weights.weights import MixerUnit, Weights, fold, named_tensors

HEADED = ModelConfig(d_model=8, num_layers=2, num_heads=4, n_ctx=16, vocab_size=11)
MIXER = "mixer_blocks.1.token_mixing_layer."
HEADLESS: dict[str, Any] = {"num_heads": 1, "use_projections": False}


def with_mixer(mixer: str, **fields: Any) -> ModelConfig:
    return msgspec.structs.replace(HEADED, mixer=mixer, **fields)


def folded(config: ModelConfig, **changed: F32) -> Weights:
    """A model's weights, some `changed` of the tensors of the second block's mixer."""
    tensors = random_tensors(config) | {MIXER + name: value for name, value in changed.items()}
    return fold(config, tensors, "fingerprint")


def exact_decay(unit: MixerUnit) -> Any:
    assert unit.decay.dtype == np.float32
    return unit.decay.astype(np.float64).sum(0)


def test_decay_is_clipped_and_taken_to_one_over_c_beyond_float32() -> None:
    raw = np.array([0.5, 0.95, 1.0, 1.5], np.float32)
    changed = {f"mixer_heads.{head}.decay_value": raw[head : head + 1] for head in range(4)}
    weights = folded(with_mixer("mixed", decay_constant=3), **changed)
    expected = np.cbrt(raw.clip(np.float32(0.9), 1).astype(np.float64))
    np.testing.assert_allclose(exact_decay(weights.layers[1].units[0]), expected, rtol=1e-14)
    pair = np.array([[0.91], [0.97]], np.float32)  # of which the second is read
    parallel = folded(with_mixer("parallel"), **{"mixer_heads.decay_value": pair})
    kernel = folded(with_mixer("kernel", kernel_size=3, **HEADLESS), decay_value=pair)
    for weights in (parallel, kernel):
        assert (exact_decay(weights.layers[1].units[0]) == np.float32(0.97)).all()
    none = folded(with_mixer("mixed", use_projections=False, decay=False)).layers[0]
    assert none.proj_in_weight is None and none.proj_out_bias is None
    assert (exact_decay(none.units[0]) == 1).all()


@pytest.mark.parametrize("quirk", [False, True])
def test_combined_heads_are_a_row_and_a_column_with_one_beta(quirk: bool) -> None:
    pair = np.array([[0.92], [0.96]], np.float32)
    changed = {f"mixer_heads.{head}.decay_value": pair for head in range(4)}
    config = with_mixer("combined", decay_constant=2, combined_row_quirk=quirk)
    row, column = folded(config, **changed).layers[1].units
    tensors = random_tensors(config)
    alpha = np.stack([tensors[f"{MIXER}mixer_heads.{head}.weight"] for head in range(4)])
    assert np.array_equal(row.alpha_in, alpha[:, 0] / 2 if quirk else alpha[:, 0])
    assert np.array_equal(column.alpha_out, alpha[:, 1])
    powers = (np.float64(pair[0, 0]) ** (1 if quirk else 0.5), np.float64(pair[1, 0]) ** 0.5)
    for unit, power in zip((row, column), powers, strict=True):
        np.testing.assert_allclose(exact_decay(unit), power, rtol=1e-14)


@pytest.mark.parametrize(
    ("config", "per_layer"),
    [
        (HEADED, 12 + 4),
        (with_mixer("combined"), 12 + 2 * 4),
        (with_mixer("expanded", decay=False), 12 + 2 * 4),
        (with_mixer("diagonal"), 12 + 5),
        (with_mixer("column_heads", decay=False), 12 + 4),
        (with_mixer("row", decay=False, **HEADLESS), 8 + 4),
        (with_mixer("kernel", kernel_size=3, **HEADLESS), 8 + 6),
    ],
)
def test_every_tensor_has_a_name_of_its_own(config: ModelConfig, per_layer: int) -> None:
    names = [name for name, _ in named_tensors(folded(config))]
    assert len(names) == len(set(names)) == 2 + 2 * per_layer
    assert "layers.1.units.0.alpha_in" in names
