"""Models of as many parameters, and of as much time, each with the learning rate that suits it."""

from __future__ import annotations

from pathlib import Path

import pytest

from research.experiments.baselines import (
    FINEMATH,
    FINEWEB,
    Settings,
    along,
    crossings,
    overtaken,
    page,
    rate_beyond,
    width_of,
)
from research.experiments.harness.learning_rates import best_rate, losses_of, or_worst
from research.experiments.harness.models import model_makers
from research.experiments.harness.result_cache import Numbers
from srm.errors import ConfigError
from srm.training.loop import Diverged
from tests.unit.experiments.conftest import Experiment

NAMES = ["SRM", "Transformer", "masked mixer", "Mamba 2", "RWKV-4"]


@pytest.mark.usefixtures("library")
def test_all_models_are_trained_and_shown(tmp_path: Path, run_experiment: Experiment) -> None:
    sizes = {"d_model": 16, "learning_rates": (1e-9, 1e-2), "further_rates": 1}
    record, text, picture = run_experiment("baselines", **sizes)
    results = record["results"]
    wanted = [f"{name}, rate {rate}" for name in NAMES for rate in ("1e-09", "0.01", "0.02")]
    wanted += [f"{name}, equal {what}" for what in ("parameters", "time") for name in NAMES]
    assert list(results) == wanted
    for name in NAMES:
        tried = [
            outcome[0] for case, outcome in results.items() if case.startswith(f"{name}, rate ")
        ]
        best = min(tried, key=lambda one: one["loss"])["learning_rate"]
        assert best != 1e-9  # which does nothing
        losses = ", ".join(f"{item['learning_rate']:g}: {item['loss']:.3f}" for item in tried)
        last = "; the best is the last that was tried on its side" if best == 2e-2 else ""
        assert f"- {name}: {losses}{last}\n" in text
        same, as_long = results[f"{name}, equal parameters"], results[f"{name}, equal time"]
        assert len(same) == len(as_long) == 2
        assert {item["learning_rate"] for item in same + as_long} == {best}
        assert {item["steps"] for item in same} == {2}
        assert len(as_long[0]["training_losses"]) == as_long[0]["steps"] >= 1
        by_clock = [*(tmp_path / "results").rglob(f"{name.replace(' ', '_')}_*_s-0.json")]
        assert len(by_clock) == (name != "SRM")
        assert f"<!-- {name} -->" in picture
        wants = "float32" if name == "RWKV-4" else as_long[0]["precision"]
        assert {item["precision"] for item in same} == {wants}
    assert text.count("of 6 pairs of cases stand in the paper's order") == 4
    assert results["SRM, equal time"] == results["SRM, equal parameters"]


@pytest.mark.parametrize("name", NAMES[1:])
def test_widths_give_as_many_parameters(name: str) -> None:
    config = Settings()
    make = model_makers(config.num_layers, config.n_ctx, vocab_size=1_024)

    def count(name: str, width: int) -> int:
        return sum(parameter.numel() for parameter in make[name](width).parameters())

    wanted = count("SRM", 96)
    width = width_of(make[name], wanted, 192)
    distances = {near: abs(count(name, near) - wanted) for near in (width - 8, width, width + 8)}
    assert min(distances, key=distances.__getitem__) == width
    assert distances[width] < 0.06 * wanted


def test_the_best_rate_is_looked_for_beyond_those_that_are_given() -> None:
    def beyond(losses: dict[float, float]) -> float:
        return rate_beyond({rate: {"loss": loss} for rate, loss in losses.items()})

    assert beyond({1: 3.0, 2: 2.0, 4: 1.0}) == 8
    assert beyond({1: 1.0, 2: 2.0, 4: 3.0}) == 0.5
    assert beyond({1: 3.0, 2: 2.0, 4: 2.5}) == 0
    assert beyond({2: 3.0}) == 4 and beyond({2: 3.0, 4: 4.0}) == 1


def test_a_rate_that_diverges_loses_and_ends_nothing() -> None:
    def diverge(_: int) -> Numbers:
        raise Diverged("the loss is nan")

    tried = {0.1: or_worst(lambda _: {"loss": 2.0})(0), 1.0: or_worst(diverge)(0)}
    tried[2.0] = or_worst(lambda _: {"loss": float("nan"), "steps": 3})(0)
    assert best_rate(tried) == 0.1
    assert losses_of(tried) == "0.1: 2.000, 1.0: diverged, 2.0: diverged"
    del tried[0.1]
    with pytest.raises(ConfigError, match=r"diverged with each of 1\.0, 2\.0"):
        best_rate(tried)


def result(loss: float, seconds: float) -> Numbers:
    losses = [loss + 1 / (i + 1) for i in range(100)]
    sizes = {"width": 8, "parameters": 1_000, "learning_rate": 0.006, "steps": 100}
    took = {"processor_seconds": seconds, "training_losses": losses}
    return {"loss": loss, **took, **sizes}


def test_the_page_has_both_comparisons() -> None:
    """Losses in FineMath's order at equal parameters, turned round at equal time."""
    results: dict[str, list[Numbers]] = {}
    for name, loss in FINEMATH.items():
        results[f"{name}, rate 0.006"] = [result(loss, 9.0)]
        for title, sign in (("parameters", 1), ("time", -1)):
            runs = [result(sign * (loss + i / 99), 9.0) for i in range(2)]
            results[f"{name}, equal {title}"] = runs
    text = "\n".join(page(Settings(), results))
    assert "| SRM | 8 | 1,000 | 0.006 | 100 | 9 | 1.619 ± 0.007 | 2.800 | 1.614 |" in text
    first, second = text.split("Equal processor time:")
    assert "Against FineMath: 6 of 6 pairs" in first and "Against FineWeb: 5 of 6 pairs" in first
    assert "Against FineMath: 0 of 6 pairs" in second
    assert list(FINEWEB) == list(FINEMATH) == NAMES[:-1]  # the paper has no loss of RWKV-4


def test_curves_say_who_overtakes_whom() -> None:
    """One that begins above and ends below in updates, and has twice the time for each."""
    falling, later = [3.0 - i / 100 for i in range(64)], [3.5 - i / 50 for i in range(64)]
    runs: dict[str, list[Numbers]] = {
        name: [{"training_losses": losses, "processor_seconds": seconds} for _ in range(2)]
        for name, losses, seconds in (("SRM", falling, 1.0), ("late", later, 2.0))
    }
    assert along(runs["SRM"])[0] == pytest.approx(3.0 - 1.5 / 100) and len(along(runs["SRM"])) == 16
    (line,) = crossings(runs, 64)
    assert line.startswith("- late: after as many updates it is below it from update 52 on")
    assert line.endswith("after as much processor time it stays above it.")
    assert overtaken([2, 2, 2], [1, 3, 1]) == 2 and overtaken([2, 2], [1, 1]) == 0
    assert overtaken([2, 2], [1, 2]) is None
