"""The second half repeats the first, and only it is trained on and counted."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import asdict

from research.experiments.__main__ import main
from research.experiments.copying import (
    PAPER,
    VARIANTS,
    Copies,
    CopyingConfig,
    case,
    copy,
    model,
    page,
    paper,
)
from research.experiments.harness.models import HEADS, SRMS
from research.experiments.harness.result_cache import Numbers
from srm.errors import ConfigError
from srm.training.data import IGNORED
from srm.training.model import SRM
from tests.unit.experiments.conftest import Experiment

SIZES = ["--d-model=16", "--n-ctx=4", "--widths=16", "--copied=2", "--ids=3"]


def test_all_variants_are_trained_and_shown(run_tiny: Experiment) -> None:
    record, text, picture = run_tiny("copying", *SIZES)
    assert list(record["results"]) == [case(variant, 16, 2) for variant in VARIANTS]
    for name, results in record["results"].items():
        assert [result["seed"] for result in results] == [0, 1]
        assert name.endswith(f" {results[0]['width']} {results[0]['copied']}")
        assert all(0 <= result["accuracy"] <= 1 and result["loss"] > 0 for result in results)
    for variant in VARIANTS:
        assert text.count(f"\n| {variant} | ") == 2
    assert "<!-- kernel 4 16 2 -->" in picture and "chance is 0.333" in text


def test_the_second_half_is_the_target() -> None:
    inputs, targets = Copies(rows=5, copied=4, ids=16, seed=(0, 7))[3]
    assert inputs.shape == targets.shape == (5, 7)
    assert torch.equal(targets[:, 3:], inputs[:, :4])
    assert torch.equal(inputs[:, 4:], inputs[:, :3])
    assert (targets[:, :3] == IGNORED).all()
    again, other = Copies(5, 4, 16, (0, 7)), Copies(5, 4, 16, (0, 8))
    assert torch.equal(again[3][0], inputs)
    assert not torch.equal(again[4][0], inputs) and not torch.equal(other[3][0], inputs)


def test_copying_is_learned() -> None:
    """Two ids, one token: its likeliest guess is right once it is learned, half as often before."""
    config = CopyingConfig(steps=60, rows=8, d_model=16, num_layers=1, ids=2, threads=1)
    result = copy(config, "mixed decay", width=16, copied=1, seed=0)
    assert result["accuracy"] == 1 and result["loss"] < 0.1


def test_widths_share_a_length_and_lengths_a_width() -> None:
    config = CopyingConfig(d_model=32, n_ctx=16, widths=(32, 64), copied=(4, 8))
    assert config.grid == [(32, 4), (32, 8), (64, 8)]


def test_variants_are_what_they_are_called() -> None:
    config = CopyingConfig()
    for variant in VARIANTS:
        made = model(config, variant, 32, 8)
        width = 16 if variant == "Mamba 2" else 32
        assert (
            asdict(made.config)["d_model"] == width and len(made.mixer_blocks) == config.num_layers
        )
        if variant in SRMS:
            assert isinstance(made, SRM) and made.config.n_ctx == 16
            assert made.config.decay == ("decay" in variant)
            is_headless = variant.startswith(("headless", "kernel"))
            assert made.config.num_heads == (1 if is_headless else HEADS)
            has_projections = not is_headless and "no projections" not in variant
            assert made.config.use_projections == has_projections
    assert asdict(model(config, "kernel 8", 32, 8).config)["kernel_size"] == 8
    assert set(PAPER) <= set(VARIANTS)


def test_the_page_sets_widths_beside_the_papers() -> None:
    config = CopyingConfig(widths=(16, 32), n_ctx=8, d_model=16, copied=(2, 4))
    results: dict[str, list[Numbers]] = {
        case(variant, width, copied): [
            {"accuracy": width / 64 / copied + noise, "processor_seconds": 6.0}
            for noise in (0, 0.01)
        ]
        for width, copied in config.grid
        for variant in VARIANTS
    }
    text = "\n".join(page(config, results))
    assert "| kernel 4 | 0.068 ± 0.007 | 0.130 ± 0.007 | 0.492 | 0.785 | – |" in text
    assert "| kernel 4 | 0.130 ± 0.007 | 0.068 ± 0.007 |" in text
    assert "From 2 to 4 copied tokens the accuracy of 10 of 10 variants falls" in text
    assert paper(config)["Mamba 2 32 4"] == 0.512 and "headless 32 4" not in paper(config)
    assert "All cases took 6 processor minutes." in text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--n-ctx=9"], "n_ctx must be even, got 9"),
        (["--widths=64,32"], "widths must be one or more numbers ≥ 1 that rise"),
        (["--copied=0,4"], "copied must be one or more numbers ≥ 1 that rise"),
        (["--ids=1"], "ids must be at least 2, got 1"),
        (["--widths=24"], "widths and d_model must be multiples of 16, got 24"),
        (["--d-model=8"], "widths and d_model must be multiples of 16, got 8"),
    ],
)
def test_what_cannot_be_copied_is_refused(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        main(["copying", *flags])
