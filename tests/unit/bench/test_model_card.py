"""The demo's card says what was measured, and the measures are those that were wanted of it."""

from __future__ import annotations

import msgspec

from engine.config import DEMO_MODEL
from engine.weights.checkpoint import load_checkpoint
from training.evaluate import Evaluation


def test_the_card_quotes_the_evaluation_of_these_weights() -> None:
    found = msgspec.json.decode((DEMO_MODEL / "evaluation.json").read_bytes(), type=Evaluation)
    card = (DEMO_MODEL / "README.md").read_text()
    assert found.fingerprint == load_checkpoint(DEMO_MODEL).fingerprint
    for figure in (found.greedy, *found.pass_at.values(), *found.pass_at_1_by_kind.values()):
        assert f" {figure:.3f} " in card


def test_massive_sampling_is_worth_something() -> None:
    found = msgspec.json.decode((DEMO_MODEL / "evaluation.json").read_bytes(), type=Evaluation)
    assert 0.2 < found.pass_at["1"] < 0.7
    assert found.pass_at["1000"] > 0.95
