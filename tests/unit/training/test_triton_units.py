"""Triton's kernels for token mixing are the float64 model, forward and backward.

Here Triton's interpreter runs them, in numpy. It multiplies bits of bfloat16 as integers, so 16
bits are tested as float16.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from srm.engine.config import Mixer, ModelConfig
from srm.errors import ConfigError
from srm.training.huggingface.units_srm import Places, Unit, place_units
from srm.training.model import SRM
from tests.kit.models.units import check_unit
from tests.unit.training.test_torch_model import error, gradients, random_ids, randomized

with pytest.MonkeyPatch.context() as patch:
    patch.setenv("TRITON_INTERPRET", "1")  # read when Triton is imported
    pytest.importorskip("triton", reason="Triton comes with torch for a GPU")
    from srm.training.huggingface.units_triton import run_unit


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")


HEADLESS = {"num_heads": 1, "use_projections": False}
MIXERS: dict[Mixer, dict[str, Any]] = {
    "mixed": {},
    "parallel": {},
    "combined": {},
    "diagonal": {},
    "column_heads": {"decay": False},
    "row": {"decay": False, **HEADLESS},
    "expanded": {"decay": False, **HEADLESS},
}


def model_of(mixer: Mixer, n_ctx: int, decay: float | None = None, d_model: int = 24) -> SRM:
    """In float64 of numbers that float32 has; its decays differ by head unless they are given."""
    shape = {"num_layers": 1, "num_heads": 2, "vocab_size": 31, "d_model": d_model}
    config = ModelConfig(**{**shape, **MIXERS.get(mixer, {})}, mixer=mixer, n_ctx=n_ctx)
    model = randomized(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("decay_value"):
                parameter.uniform_(0.901, 0.999)
                if decay is not None:
                    parameter.fill_(decay)
    return model.float().double()


def check(model: SRM) -> None:
    """Logits and all gradients in float32 are within its rounding of the published form's."""
    ids = random_ids(model.config, seed=1)
    expected = model(ids, chunk=model.config.n_ctx)
    wanted = gradients(model, expected)
    model = model.float()
    model.run_unit = run_unit
    result = model(ids)
    assert error(result.double(), expected) <= 2e-6
    for name, gradient in gradients(model, result).items():
        assert error(gradient.double(), wanted[name]) <= 2e-5, name


@pytest.mark.parametrize("mixer", MIXERS)
def test_all_mixers_have_the_logits_and_gradients(mixer: Mixer) -> None:
    check(model_of(mixer, 150))


@pytest.mark.parametrize("n_ctx", [2, 63, 64, 65, 200])
def test_lengths_need_not_be_multiples_of_a_chunk(n_ctx: int) -> None:
    check(model_of("mixed", n_ctx))


@pytest.mark.parametrize("decay", [0.9001, 1.0])
def test_both_ends_of_the_decays_range(decay: float) -> None:
    check(model_of("mixed", 193, decay))


def test_heads_may_be_wider_than_a_program() -> None:
    check(model_of("mixed", 70, d_model=144))


def test_sixteen_bits_are_as_exact_as_by_torch() -> None:
    """Of a long unit: its decay's gradient is a difference of two sums that grow with length."""
    check_unit(torch.float16, run_unit, (1, 2_000, 2, 16))


def test_compiled_for_sm_90_products_use_tensor_cores(tmp_path: Path) -> None:
    """And no register spills; in a process of its own, where Triton compiles."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    del environment["TRITON_INTERPRET"]
    command = [sys.executable, "-m", "tests.kit.models.triton_compiled", str(tmp_path)]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    forward, backward = json.loads(done.stdout)
    assert backward["products"] == 2 * forward["products"] > 0
    assert forward["stack"] == backward["stack"] == 0, done.stdout


def test_no_matrices_of_powers_are_made() -> None:
    places = Places(slice(70), run=run_unit)
    unit = Unit(torch.ones(1, 1, dtype=torch.float64), torch.ones(1, 1, 70))
    ((placed,),) = place_units([unit], places, 70, torch.float32)
    assert placed.levels == ()


def test_what_the_kernels_do_not_know_is_refused() -> None:
    config = ModelConfig(8, 1, 1, 9, 31, mixer="kernel", kernel_size=2, use_projections=False)
    several, separate = randomized(config).float(), model_of("mixed", 9).float()
    separate.separator = 0
    for model, what in ((several, "mixer = kernel"), (separate, "separate documents")):
        model.run_unit = run_unit
        with pytest.raises(ConfigError, match=f"the Triton kernel cannot train with {what}"):
            model(random_ids(model.config, seed=1))
