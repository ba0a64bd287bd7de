"""Losses over parameters and compute follow power laws; tokens held follow from losses."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from research.experiments import capacity, scaling
from research.experiments.__main__ import main
from research.experiments.harness import runner
from research.experiments.harness.models import count_flops, model_makers
from research.experiments.scaling import ScalingConfig, case, frontier, power_law
from srm.errors import ConfigError


def run_twice(
    name: str, flags: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[str, Any], str, str]:
    """The record, page and picture; the second time from disk."""
    places = [f"--output={folder}", f"--results={folder / 'results'}", "--threads=1"]
    assert main([name, *flags, *places]) == 0
    (page,) = folder.glob("*.md")
    text = page.read_text()
    monkeypatch.setattr(runner, "Run", None)  # nothing is trained again
    assert main([name, *flags, *places]) == 0 and page.read_text() == text
    record = json.loads(page.with_suffix(".json").read_text())
    return record, text, page.with_suffix(".svg").read_text()


@pytest.mark.usefixtures("library")
def test_sizes_and_durations_are_trained_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--widths=8,16", "--durations=1,3", "--seeds=0,1", "--rows=2", "--n-ctx=16"]
    flags += ["--num-layers=1", "--max-vocab-size=300"]
    record, text, picture = run_twice("scaling", flags, tmp_path / "out", monkeypatch)
    assert len(record["results"]) == 8
    for name in scaling.NAMES:
        short, long = (record["results"][case(name, 16, steps)][0] for steps in (1, 3))
        assert long["flops"] == 3 * short["flops"] and long["loss"] != short["loss"]
        assert text.count(f"\n| {name} | ") == 5
        assert f"<!-- {name} -->" in picture
    assert "Over parameters: " in text and "Over compute: " in text


@pytest.mark.parametrize("name", scaling.NAMES)
def test_operations_are_those_of_all_products(name: str) -> None:
    model = model_makers(1, 16, 32)[name](8)
    channels = 2 * 8 * 32 if name == "SRM" else 3 * 8 * 16
    mixing = 2 * 8 * 8 + 16 * 8 if name == "SRM" else 4 * 8 * 8 + 2 * 16 * 8
    assert count_flops(model, 16) == 6 * 16 * (channels + mixing + 8 * 32)


def test_the_power_of_a_law_is_fitted_with_its_interval() -> None:
    xs = [1e3, 1e3, 1e4, 1e4, 1e5, 1e5]
    noise = [1.01, 0.99, 0.99, 1.01, 1.01, 0.99]
    law = power_law(xs, [9 * x**-0.2 * of for x, of in zip(xs, noise, strict=True)])
    assert law.low < -0.2 < law.high and law.exponent == pytest.approx(-0.2, abs=0.005)
    assert law.factor == pytest.approx(9, rel=0.05)
    exact = power_law(xs, [9 * x**-0.2 for x in xs])
    assert exact == pytest.approx((-0.2, -0.2, -0.2, 9))
    fitted = {"SRM": {"flops": law}, "Transformer": {"flops": exact}}
    assert scaling.comparison(fitted, "flops") == "the intervals of both exponents overlap."
    steeper = power_law(xs, [90 * x**-0.4 for x in xs])  # the same at 10^5
    sentence = scaling.comparison(
        {"SRM": {"flops": exact}, "Transformer": {"flops": steeper}}, "flops"
    )
    assert sentence == "the Transformer's loss falls faster; the laws meet at 10^5.0, extrapolated."
    assert scaling.comparison({"SRM": {}, "Transformer": {"flops": law}}, "flops").startswith("too")


def test_the_frontier_leaves_out_what_less_compute_does_better() -> None:
    points = {"a": (1, 5.0), "b": (2, 6.0), "c": (3, 4.0), "d": (4, 4.0), "e": (9, 1.0)}
    results = {
        f"SRM {name}": [{"flops": flops, "loss": loss}] for name, (flops, loss) in points.items()
    }
    assert frontier(results, "SRM") == ["SRM a", "SRM c", "SRM e"]


def test_learning_rates_fall_with_the_root_of_the_width() -> None:
    config = ScalingConfig(learning_rate=0.01, learning_rate_other=0.004)
    assert config.rate("SRM", 96) == 0.01 and config.rate("SRM", 24) == pytest.approx(0.02)
    assert config.rate("Transformer", 384) == pytest.approx(0.002)


def test_tokens_held_are_measured_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--widths=8,16", "--copied=1,2", "--ids=3", "--steps=80", "--rows=4"]
    flags += ["--learning-rate=1e-2", "--num-layers=1", "--seeds=0"]
    record, text, picture = run_twice("capacity", flags, tmp_path / "out", monkeypatch)
    assert list(record["results"]) == ["8 1", "8 2", "16 1", "16 2"]
    for name, (run,) in record["results"].items():
        copied = int(name.split()[1])
        held = copied * max(0, 1 - run["loss"] / math.log(3))
        assert run["held"] == pytest.approx(held) and held <= copied
    (run,) = record["results"]["16 1"]
    assert run["accuracy"] > 0.9 and run["held"] > 0.5  # one token is learned
    assert "\n| 16 | 16 | " in text and "<!-- d 16 -->" in picture
    assert "is 0.925 tokens a number" in text


def test_the_most_held_is_of_the_best_length() -> None:
    config = capacity.CapacityConfig(widths=(8,), copied=(2, 4, 8))
    results = {
        capacity.case(8, n): [{"held": of - 0.5}, {"held": of + 0.5}]
        for n, of in ((2, 2.0), (4, 3.5), (8, 1.0))
    }
    assert capacity.most_held(config, results, 8) == (3.5, 4)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["scaling", "--widths=32"], "widths must be two or more numbers ≥ 8 that rise, got"),
        (["scaling", "--widths=32,20"], "widths must be two or more numbers ≥ 8 that rise, got"),
        (["scaling", "--widths=20,32"], "widths must be multiples of 8, got"),
        (["scaling", "--durations=0,1"], "durations must be two or more numbers ≥ 1 that rise"),
        (["scaling", "--learning-rate-other=0"], "learning_rate_other must be above 0"),
        (["capacity", "--copied=4,2"], "copied must be one or more numbers ≥ 1 that rise"),
        (["capacity", "--widths="], "widths must be one or more numbers ≥ 8 that rise"),
        (["capacity", "--widths=12"], "widths must be multiples of 8, got"),
        (["capacity", "--ids=1"], "ids must be at least 2, got 1"),
    ],
)
def test_what_cannot_be_compared_is_refused(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        main(flags)
