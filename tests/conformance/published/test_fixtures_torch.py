"""Both forms of the torch model, in float32, give the logits of the published code."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from srm.engine.weights.tensors import is_scalar
from srm.training.checkpoint import load_model
from srm.training.model import SRM
from tests.kit.models.forms import TOLERANCE, error
from tests.kit.models.published import cases, convert_fixture, parametrized


def run(model: SRM, ids: Tensor, form: str) -> Tensor:
    """Logits [rows, length, vocab] of one of the two forms."""
    with torch.no_grad():
        if form == "parallel":
            logits: Tensor = model(ids)
            return logits
        state, results = model.empty_state(len(ids)), []
        for position in range(ids.shape[1]):
            at_position, state = model.step(ids[:, position], state, position)
            results.append(at_position)
        return torch.stack(results, dim=1)


@pytest.mark.parametrize("form", ["parallel", pytest.param("recurrent", marks=pytest.mark.slow)])
@parametrized()
def test_logits_are_those_of_the_published_code(name: str, form: str, tmp_path: Path) -> None:
    model = load_model(convert_fixture(name, tmp_path))
    for ids, positions, expected in cases(name):
        ran = run(model, torch.from_numpy(ids), form)
        assert torch.isfinite(ran).all()
        assert error(ran[:, positions].numpy(), expected) < TOLERANCE


@pytest.mark.parametrize("form", ["parallel", "recurrent"])
def test_tiny_alphas_of_either_sign_are_exact(form: str, tmp_path: Path) -> None:
    """The published recurrence divides by them: 1e-8 costs it all its digits, 0 gives NaN."""
    name = "a1_mixed_proj_decay_n64"
    model = load_model(convert_fixture(name, tmp_path))
    random = np.random.default_rng(0)
    with torch.no_grad():
        for parameter, values in model.named_parameters():
            if is_scalar(parameter) and parameter.endswith(".weight"):
                chosen = torch.from_numpy(random.random(values.shape) < 0.3)
                tiny = random.choice([1e-8, -1e-8, 0.0, 1e-30], values.shape)
                values[chosen] = torch.from_numpy(tiny).float()[chosen]
    ids = torch.from_numpy(np.concatenate([ids for ids, _, _ in cases(name)][-1:]))
    exact = load_model(tmp_path).double()
    exact.load_state_dict(model.state_dict())
    expected = run(exact, ids, "parallel").numpy()
    assert error(run(model, ids, form).numpy(), expected) < TOLERANCE
