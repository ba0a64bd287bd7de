"""Copying: only the second half is trained on and counted; how it goes with the gap and with λ."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import asdict

from research.experiments import copying, memory
from research.experiments.harness.result_cache import Numbers
from srm.training.data import IGNORED
from tests.unit.experiments.conftest import Experiment

SIZES = {"d_model": 16, "n_ctx": 4, "widths": (16,), "copied": (2,), "ids": 3}


def test_all_variants_are_trained_and_shown(run_experiment: Experiment) -> None:
    record, text, picture = run_experiment("copying", **SIZES)
    assert list(record["results"]) == [copying.case(variant, 16, 2) for variant in copying.VARIANTS]
    for name, results in record["results"].items():
        assert [result["seed"] for result in results] == [0, 1]
        assert name.endswith(f" {results[0]['width']} {results[0]['copied']}")
        assert all(0 <= result["accuracy"] <= 1 and result["loss"] > 0 for result in results)
    for variant in copying.VARIANTS:
        assert text.count(f"\n| {variant} | ") == 2
    assert "<!-- kernel 4 16 2 -->" in picture and "chance is 0.333" in text


def test_the_second_half_is_the_target() -> None:
    inputs, targets = copying.Copies(rows=5, copied=4, ids=16, seed=(0, 7))[3]
    assert inputs.shape == targets.shape == (5, 7)
    assert torch.equal(targets[:, 3:], inputs[:, :4])
    assert torch.equal(inputs[:, 4:], inputs[:, :3])
    assert (targets[:, :3] == IGNORED).all()
    again, other = copying.Copies(5, 4, 16, (0, 7)), copying.Copies(5, 4, 16, (0, 8))
    assert torch.equal(again[3][0], inputs)
    assert not torch.equal(again[4][0], inputs) and not torch.equal(other[3][0], inputs)


def test_copying_is_learned() -> None:
    """Two ids, one token: its likeliest guess is right once it is learned, half as often before."""
    config = copying.Settings(steps=60, rows=8, d_model=16, num_layers=1, ids=2, threads=1)
    result = copying.copy(config, "mixed decay", width=16, copied=1, seed=0)
    assert result["accuracy"] == 1 and result["loss"] < 0.1


def test_widths_share_a_length_and_lengths_a_width() -> None:
    config = copying.Settings(d_model=32, n_ctx=16, widths=(32, 64), copied=(4, 8))
    assert config.grid == [(32, 4), (32, 8), (64, 8)]


def test_mamba_2_is_half_as_wide_as_others() -> None:
    config = copying.Settings()
    for variant in copying.VARIANTS:
        made = copying.model(config, variant, 32, 8)
        assert asdict(made.config)["d_model"] == (16 if variant == "Mamba 2" else 32)
        assert len(made.mixer_blocks) == config.num_layers
    assert set(copying.PAPER) <= set(copying.VARIANTS)


def test_the_page_sets_widths_beside_the_papers() -> None:
    config = copying.Settings(widths=(16, 32), n_ctx=8, d_model=16, copied=(2, 4))
    results: dict[str, list[Numbers]] = {
        copying.case(variant, width, copied): [
            {"accuracy": width / 64 / copied + noise, "processor_seconds": 6.0}
            for noise in (0, 0.01)
        ]
        for width, copied in config.grid
        for variant in copying.VARIANTS
    }
    text = "\n".join(copying.page(config, results))
    assert "| kernel 4 | 0.068 ± 0.007 | 0.130 ± 0.007 | 0.492 | 0.785 | – |" in text
    assert "| kernel 4 | 0.130 ± 0.007 | 0.068 ± 0.007 |" in text
    assert "From 2 to 4 copied tokens the accuracy of 10 of 10 variants falls" in text
    paper = copying.paper(config)
    assert paper["Mamba 2 32 4"] == 0.512 and "headless 32 4" not in paper
    assert "All cases took 6 processor minutes." in text


@pytest.mark.usefixtures("library")
def test_all_treatments_of_decays_are_trained_and_shown(run_experiment: Experiment) -> None:
    record, text, picture = run_experiment("memory", copied=(2, 3), text_steps=2, ids=3)
    cases = [f"{name} {gap}" for name in memory.TREATMENTS for gap in ("2", "3", "text")]
    assert list(record["results"]) == cases
    for name, results in record["results"].items():
        assert [result["seed"] for result in results] == [0, 1]
        assert len(results[0]["decays"]) == (0 if name.startswith("no decay") else 4)
        assert {result["precision"] for result in results} < {"float32", "bfloat16"}
    for name in memory.TREATMENTS:
        assert text.count(f"\n| {name} | ") == 2
    assert "<!-- a fiftieth -->" in picture and "chance is 0.333" in text


def test_treatments_set_decays_and_their_rates() -> None:
    config = memory.Settings(d_model=8)
    wanted: dict[str, list[float]] = {"no decay": [], "as published": [1.0] * 8}
    wanted["a fiftieth"] = [0.9] * 4 + [1] * 4
    for name, expected in wanted.items():
        assert memory.decays(memory.model(config, name, 4, 3)) == pytest.approx(expected)
    # Where nothing is forgotten, sums are as large whatever the treatment.
    largest = {
        name: {
            float(p.detach().max())
            for n, p in made.named_parameters()
            if n.endswith("heads.1.weight")
        }
        for name in ("no decay", "as published")
        for made in [memory.model(config, name, 4, 3)]
    }
    assert largest == {"no decay": {0.5}, "as published": {0.5}}
    config = memory.Settings(steps=20, rows=2, d_model=8, num_layers=1)
    ends = {name: memory.copy(config, name, 4, 0)["decays"] for name in memory.TREATMENTS}
    assert ends["a fiftieth"][2] > 0.998 > ends["the model's rate"][2] >= 0.9
