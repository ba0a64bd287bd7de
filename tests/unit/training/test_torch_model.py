"""The two forms of the torch model are one function."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.config import ModelConfig
from training.model import SRM


def _model(config: ModelConfig, seed: int = 0) -> SRM:
    torch.manual_seed(seed)
    model = SRM(config).double()
    with torch.no_grad():  # scalars far from their initial values, decay out of its range too
        for name, parameter in model.named_parameters():
            if name.endswith("decay_value"):
                parameter.copy_(torch.empty(1).uniform_(0.85, 1.05))
            elif ".mixer_heads." in name or name.endswith("bias"):
                parameter.normal_()
    return model


def _recurrent(model: SRM, ids: Tensor) -> Tensor:
    state, logits = model.empty_state(len(ids)), []
    for position in range(ids.shape[1]):
        at_position, state = model.step(ids[:, position], state, position)
        logits.append(at_position)
    return torch.stack(logits, dim=1)


@pytest.mark.parametrize("use_projections", [True, False])
@pytest.mark.parametrize("decay", [True, False])
@pytest.mark.parametrize(("n_ctx", "constant", "heads"), [(64, 1, 4), (700, 1, 2), (1030, 2, 8)])
def test_parallel_equals_recurrent(
    use_projections: bool, decay: bool, n_ctx: int, constant: int, heads: int
) -> None:
    config = ModelConfig(
        d_model=16,
        num_layers=2,
        num_heads=heads,
        n_ctx=n_ctx,
        vocab_size=31,
        use_projections=use_projections,
        decay=decay,
        decay_constant=constant,
    )
    model = _model(config)
    ids = torch.randint(0, 31, (2, n_ctx), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        parallel, recurrent = model(ids), _recurrent(model, ids)
    assert (parallel - recurrent).abs().max() <= 1e-9 * parallel.abs().max()


def test_a_token_changes_nothing_before_it() -> None:
    model = _model(ModelConfig(d_model=16, num_layers=2, num_heads=4, n_ctx=32, vocab_size=31))
    ids = torch.randint(0, 31, (1, 32), generator=torch.Generator().manual_seed(1))
    changed = ids.clone()
    changed[0, 20] = (ids[0, 20] + 1) % 31
    with torch.no_grad():
        before, after = model(ids), model(changed)
    assert torch.equal(before[:, :20], after[:, :20])
    assert not torch.equal(before[:, 20:], after[:, 20:])


def test_a_shorter_input_gives_the_same_first_logits() -> None:
    model = _model(ModelConfig(d_model=16, num_layers=2, num_heads=4, n_ctx=32, vocab_size=31))
    ids = torch.randint(0, 31, (2, 32), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(model(ids[:, :9]), model(ids)[:, :9], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("decay", [0.9, 1.0])
def test_gradients_are_finite_at_both_ends_of_the_decay(decay: float) -> None:
    config = ModelConfig(d_model=16, num_layers=1, num_heads=4, n_ctx=850, vocab_size=31)
    torch.manual_seed(0)
    model = SRM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("decay_value"):
                parameter.fill_(decay)
    model(torch.randint(0, 31, (1, 850))).square().mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), name
