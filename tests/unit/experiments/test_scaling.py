"""Losses over parameters and compute follow power laws; tokens held follow from losses."""

from __future__ import annotations

import math

import pytest

from research.experiments import capacity, scaling
from research.experiments.harness.models import count_flops, model_makers
from research.experiments.scaling import Settings, case, frontier, power_law
from tests.unit.experiments.conftest import Experiment


@pytest.mark.usefixtures("library")
def test_sizes_and_durations_are_trained_and_shown(run_experiment: Experiment) -> None:
    record, text, picture = run_experiment("scaling", widths=(8, 16), durations=(1, 3))
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
    fitted = {"SRM": {"flops": exact}, "Transformer": {"flops": steeper}}
    sentence = scaling.comparison(fitted, "flops")
    assert sentence == "the Transformer's loss falls faster; the laws meet at 10^5.0, extrapolated."
    assert scaling.comparison({"SRM": {}, "Transformer": {"flops": law}}, "flops").startswith("too")


def test_the_frontier_leaves_out_what_less_compute_does_better() -> None:
    points = {"a": (1, 5.0), "b": (2, 6.0), "c": (3, 4.0), "d": (4, 4.0), "e": (9, 1.0)}
    results = {
        f"SRM {name}": [{"flops": flops, "loss": loss}] for name, (flops, loss) in points.items()
    }
    assert frontier(results, "SRM") == ["SRM a", "SRM c", "SRM e"]


def test_learning_rates_fall_with_the_root_of_the_width() -> None:
    config = Settings(learning_rate=0.01, learning_rate_other=0.004)
    assert config.rate("SRM", 96) == 0.01 and config.rate("SRM", 24) == pytest.approx(0.02)
    assert config.rate("Transformer", 384) == pytest.approx(0.002)


def test_tokens_held_are_measured_and_shown(run_experiment: Experiment) -> None:
    sizes = {"widths": (8, 16), "copied": (1, 2), "ids": 3, "steps": 80, "rows": 4}
    record, text, picture = run_experiment("capacity", "--seeds=0", learning_rate=1e-2, **sizes)
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
    config = capacity.Settings(widths=(8,), copied=(2, 4, 8))
    results = {
        capacity.case(8, n): [{"held": of - 0.5}, {"held": of + 0.5}]
        for n, of in ((2, 2.0), (4, 3.5), (8, 1.0))
    }
    assert capacity.most_held(config, results, 8) == (3.5, 4)
