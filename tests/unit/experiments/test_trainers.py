"""TRL's trainer and ours, set side by side: what is said of results, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from research.experiments.__main__ import main
from research.experiments.harness.result_cache import Numbers
from research.experiments.trainers import (
    SRM,
    START,
    TRL,
    TrainersConfig,
    agreement,
    difference,
    page,
)
from srm.errors import ConfigError


def result(right: list[int], known: list[int]) -> Numbers:
    """Return a result of two updates; problems have ten samples, a third of the time is waiting."""
    times = {"seconds": [2.0, 4.0], "waited": [1.0, 1.0], "tokens": [50, 70]}
    learned = {"rewards": [0.25, 0.75], "mixed": [1.0, 0.5], "trl": "1", "torch": "2"}
    return {"right": right, "known": known, "samples": 10, **times, **learned}


RESULTS = {
    START: [result([1, 3], [2, 2])],
    TRL: [result([4, 6], [8, 8]), result([6, 8], [8, 8])],
    SRM: [result([4, 8], [2, 4]), result([4, 8], [2, 4])],
}


def test_trainers_differ_by_problem_and_by_seed() -> None:
    """By problem 0.1 and -0.1, whose mean has an error of 0.1; TRL's seeds solve 0.5 and 0.7, which
    is an error of 0.1 too, and ours the same."""
    assert difference(RESULTS, "right") == pytest.approx((0.0, 0.02**0.5))
    assert difference(RESULTS, "known") == pytest.approx((0.5, 0.1))


def test_what_lies_within_the_errors_agrees() -> None:
    sentence = agreement(RESULTS)
    assert "0.0000 ± 0.1414 of held-out problems, within 2 errors" in sentence
    assert "+0.5000 ± 0.1000 of those learned from, beyond 2 errors" in sentence


def test_the_page_has_what_was_learned_and_what_it_took() -> None:
    text = "\n".join(page(TrainersConfig(seeds=(0, 1)), RESULTS))
    assert "| TRL | 0.6000 | +0.4000 ± 0.0000 | 0.5000, 0.7000 | 0.8000 | +0.6000" in text
    assert "| start | 0.2000 | – | – | 0.2000 | – | – |" in text
    assert (
        "| srm train grpo | 3.00, 3.00 | 1.00, 1.00 | 33% (33% … 33%) | 60 | 0.500 | 0.500 | 75% |"
        in text
    )


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--environment=/none", "environment: /none/bin/python is missing"),
        ("--rollouts=1", "rollouts must be at least 2"),
        ("--learning-rate=nan", "learning_rate must be above 0"),
        ("--problems=0", "problems must be at least 1"),
        ("--seeds=0", "seeds must be two or more"),
    ],
)
def test_what_cannot_be_compared_is_refused(flag: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        main(["trainers", f"--results={tmp_path}", flag])
