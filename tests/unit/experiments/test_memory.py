"""Memory by gap: the treatments of λ, and what the record says of them."""

from __future__ import annotations

import pytest

from research.experiments.__main__ import main
from research.experiments.memory import TREATMENTS, MemoryConfig, copy, decays, model
from srm.errors import ConfigError
from tests.unit.experiments.conftest import Experiment


def test_all_treatments_are_trained_and_shown(run_tiny: Experiment) -> None:
    record, text, picture = run_tiny("memory", "--copied=2,3", "--text-steps=2", "--ids=3")
    whats = ("2", "3", "text")
    assert list(record["results"]) == [f"{name} {what}" for name in TREATMENTS for what in whats]
    for name, results in record["results"].items():
        assert [result["seed"] for result in results] == [0, 1]
        assert len(results[0]["decays"]) == (0 if name.startswith("no decay") else 4)
        assert {result["precision"] for result in results} < {"float32", "bfloat16"}
    for name in TREATMENTS:
        assert text.count(f"\n| {name} | ") == 2
    assert "<!-- a fiftieth -->" in picture and "chance is 0.333" in text


def test_treatments_are_what_they_are_called() -> None:
    config = MemoryConfig(d_model=8)
    assert decays(model(config, "no decay", 4, 3)) == []
    assert decays(model(config, "as published", 4, 3)) == [1.0] * 8
    assert decays(model(config, "a fiftieth", 4, 3)) == pytest.approx([0.95] * 4 + [1] * 4)
    ends = {
        name: copy(MemoryConfig(steps=20, rows=2, d_model=8, num_layers=1), name, 4, 0)["decays"]
        for name in TREATMENTS
    }
    assert ends["a fiftieth"][0] > 0.948 > ends["the model's rate"][0] >= 0.9


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--copied=4,2"], "copied must be one or more numbers ≥ 1 that rise"),
        (["--copied="], "copied must be one or more numbers ≥ 1 that rise"),
        (["--ids=1"], "ids must be at least 2, got 1"),
        (["--d-model=6"], "must divide d_model = 6"),
    ],
)
def test_what_cannot_be_remembered_is_refused(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        main(["memory", *flags])
