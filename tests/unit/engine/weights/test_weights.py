"""Every mixer is folded into units as its definition says."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from engine.config import ModelConfig
from engine.steps.batch import F32
from engine.weights.random_model import random_tensors
from engine.weights.weights import MixerUnit, Weights, fold, named_tensors

HEADED = ModelConfig(d_model=8, num_layers=2, num_heads=4, n_ctx=16, vocab_size=11)
MIXER = "mixer_blocks.1.token_mixing_layer."


def with_mixer(mixer: str, **fields: Any) -> ModelConfig:
    return msgspec.structs.replace(HEADED, mixer=mixer, **fields)


HEADLESS: dict[str, Any] = {"num_heads": 1, "use_projections": False}


def folded(config: ModelConfig, **changed: F32) -> tuple[dict[str, F32], Weights]:
    """The tensors below the second block's mixer, some `changed`, and the model's weights."""
    tensors = random_tensors(config) | {MIXER + name: value for name, value in changed.items()}
    mixer = {name.removeprefix(MIXER): t for name, t in tensors.items() if name.startswith(MIXER)}
    return mixer, fold(config, tensors, "fingerprint")


def exact_decay(unit: MixerUnit) -> Any:
    assert unit.decay.dtype == np.float32
    return unit.decay.astype(np.float64).sum(0)


def test_matrices_are_turned_and_heads_joined() -> None:
    mixer, weights = folded(HEADED)
    tensors = random_tensors(HEADED)
    assert np.array_equal(weights.embedding, tensors["input_layer.weight"])
    assert np.array_equal(weights.head, tensors["output_layer.weight"].T)
    layer = weights.layers[1]
    assert layer.proj_in_weight is not None and layer.proj_in_bias is not None
    for head in range(4):
        columns = slice(2 * head, 2 * head + 2)
        assert np.array_equal(layer.proj_in_weight[:, columns], mixer[f"proj_head.{head}.weight"].T)
        assert np.array_equal(layer.proj_in_bias[columns], mixer[f"proj_head.{head}.bias"])


@pytest.mark.parametrize("mixer", ["mixed", "diagonal"])
def test_the_first_half_of_mixed_heads_weighs_on_the_way_out(mixer: str) -> None:
    tensors, weights = folded(with_mixer(mixer))
    (unit,) = weights.layers[1].units
    for head in range(4):
        alpha = tensors[f"mixer_heads.{head}.weight"][0]
        weighing, other = (
            (unit.alpha_out, unit.alpha_in) if head < 2 else (unit.alpha_in, unit.alpha_out)
        )
        assert np.array_equal(weighing[head], alpha)
        assert (other[head] == 1).all()
        assert np.array_equal(unit.beta[head], tensors[f"mixer_heads.{head}.bias"])
        if mixer == "diagonal":
            assert unit.gamma is not None
            delta = tensors[f"mixer_heads.{head}.diag_weight"]
            np.testing.assert_allclose(unit.gamma[head] + alpha, delta + 0 * alpha, atol=1e-6)


@pytest.mark.parametrize("mixer", ["row", "column", "column_heads"])
def test_one_kind_of_head_is_all_of_it(mixer: str) -> None:
    fields = {} if mixer == "column_heads" else HEADLESS
    tensors, weights = folded(with_mixer(mixer, decay=False, **fields))
    (unit,) = weights.layers[1].units
    weighing, other = (
        (unit.alpha_in, unit.alpha_out) if mixer == "row" else (unit.alpha_out, unit.alpha_in)
    )
    names = ["weight"] if fields else [f"mixer_heads.{head}.weight" for head in range(4)]
    assert np.array_equal(weighing, np.concatenate([tensors[name] for name in names]))
    assert (other == 1).all() and (exact_decay(unit) == 1).all()


def test_decay_is_clipped_and_taken_to_one_over_c_beyond_float32() -> None:
    raw = np.array([0.5, 0.95, 1.0, 1.5], np.float32)
    changed = {f"mixer_heads.{head}.decay_value": raw[head : head + 1] for head in range(4)}
    _, weights = folded(with_mixer("mixed", decay_constant=3), **changed)
    expected = np.cbrt(raw.clip(np.float32(0.9), 1).astype(np.float64))
    np.testing.assert_allclose(exact_decay(weights.layers[1].units[0]), expected, rtol=1e-14)


def test_parallel_heads_share_the_second_of_their_two_decays() -> None:
    pair = np.array([[0.91], [0.97]], np.float32)
    tensors, weights = folded(with_mixer("parallel"), **{"mixer_heads.decay_value": pair})
    layer = weights.layers[1]
    (unit,) = layer.units
    assert (exact_decay(unit) == np.float32(0.97)).all()
    assert np.array_equal(unit.alpha_out[:2], tensors["mixer_heads.weight"][:2])
    assert np.array_equal(unit.alpha_in[2:], tensors["mixer_heads.weight"][2:])
    assert np.array_equal(unit.beta, tensors["mixer_heads.bias"])
    assert layer.proj_in_weight is not None
    assert np.array_equal(layer.proj_in_weight, tensors["in_proj.weight"].T)


@pytest.mark.parametrize("quirk", [False, True])
def test_combined_heads_are_a_row_and_a_column_with_one_beta(quirk: bool) -> None:
    pair = np.array([[0.92], [0.96]], np.float32)
    changed = {f"mixer_heads.{head}.decay_value": pair for head in range(4)}
    config = with_mixer("combined", decay_constant=2, combined_row_quirk=quirk)
    tensors, weights = folded(config, **changed)
    row, column = weights.layers[1].units
    alpha = np.stack([tensors[f"mixer_heads.{head}.weight"] for head in range(4)])
    assert np.array_equal(row.alpha_in, alpha[:, 0] / 2 if quirk else alpha[:, 0])
    assert np.array_equal(column.alpha_out, alpha[:, 1])
    assert (row.alpha_out == 1).all() and (column.alpha_in == 1).all()
    assert np.array_equal(row.beta[3], tensors["mixer_heads.3.bias"]) and not column.beta.any()
    powers = (np.float64(pair[0, 0]) ** (1 if quirk else 0.5), np.float64(pair[1, 0]) ** 0.5)
    for unit, power in zip((row, column), powers, strict=True):
        np.testing.assert_allclose(exact_decay(unit), power, rtol=1e-14)


def test_a_kernel_keeps_plain_sums_and_weighs_them_afterwards() -> None:
    pair = np.array([[0.91], [0.97]], np.float32)
    config = with_mixer("kernel", kernel_size=3, **HEADLESS)
    tensors, weights = folded(config, decay_value=pair)
    (unit,) = weights.layers[1].units
    assert (unit.alpha_in == 1).all() and (unit.alpha_out == 1).all() and not unit.beta.any()
    assert exact_decay(unit) == np.float32(0.97)
    assert unit.taps is not None and np.array_equal(unit.taps, tensors["weight"])
    assert unit.taps_beta is not None and np.array_equal(unit.taps_beta, tensors["bias"])


@pytest.mark.parametrize("heads", [1, 4])
def test_expanded_is_two_columns(heads: int) -> None:
    config = with_mixer("expanded", decay=False, num_heads=heads, use_projections=heads > 1)
    tensors, weights = folded(config)
    for stage, unit in zip((0, 2), weights.layers[1].units, strict=True):
        for head in range(heads):
            prefix = f"mixer_heads.{head}.{stage}." if heads > 1 else f"{stage}."
            assert np.array_equal(unit.alpha_out[head], tensors[prefix + "weight"][0])
            assert np.array_equal(unit.beta[head], tensors[prefix + "bias"][0])
        assert (unit.alpha_in == 1).all() and (exact_decay(unit) == 1).all()


def test_a_model_without_projections_or_decay_has_none() -> None:
    _, weights = folded(with_mixer("mixed", use_projections=False, decay=False))
    layer = weights.layers[0]
    assert layer.proj_in_weight is None and layer.proj_out_bias is None
    assert (exact_decay(layer.units[0]) == 1).all()


@pytest.mark.parametrize(
    ("config", "per_layer"),
    [
        (HEADED, 12 + 4),
        (with_mixer("combined"), 12 + 2 * 4),
        (with_mixer("diagonal"), 12 + 5),
        (with_mixer("kernel", kernel_size=3, **HEADLESS), 8 + 6),
    ],
)
def test_every_tensor_has_a_name_of_its_own(config: ModelConfig, per_layer: int) -> None:
    names = [name for name, _ in named_tensors(folded(config)[1])]
    assert len(names) == len(set(names)) == 2 + 2 * per_layer
    assert "layers.1.units.0.alpha_in" in names
