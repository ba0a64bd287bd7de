"""Fine-tuning, GRPO and trainers: what is right before and after them is set side by side."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from research.experiments import finetuning, grpo, rollouts, trainers
from research.experiments.finetuning import AFTER, BEFORE, gain, generated, law, powers, rates
from research.experiments.grpo import BALANCED, PLAIN, START, Settings, agreement
from research.experiments.harness.result_cache import Numbers
from research.experiments.rollouts import CASES
from srm.engine.config import ModelConfig
from srm.training.checkpoint import save_model
from srm.training.grpo import engine_sampler
from srm.training.model import SRM
from srm.training.questions.questions import Question
from srm.training.questions.rewards import gsm8k_strict
from srm.training.statistics.coverage import spaced
from srm.training.statistics.power_law import fit
from srm.training.text.tokenizer import train_tokenizer
from tests.unit.experiments.conftest import Experiment, numpy_sampler

Run = Callable[..., tuple[dict[str, list[Numbers]], str]]
CASES_BY = (finetuning, "solved"), (grpo, "solved"), (rollouts, "grpo")


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model folder that knows nothing; the numpy engine samples from it."""
    folder = tmp_path / "base"
    tokenizer = train_tokenizer((row["question"] for row in generated(50, 1)), 300)
    torch.manual_seed(0)
    model = SRM(ModelConfig(16, 1, 2, 256, tokenizer.get_vocab_size()))
    save_model(model.config, model.state_dict(), folder)
    (folder / "tokenizer.json").write_text(tokenizer.to_str())

    for module in (finetuning, engine_sampler):
        monkeypatch.setattr(module, "engine_sampler", numpy_sampler)
    return folder


@pytest.fixture
def run(base: Path, run_experiment: Experiment) -> Run:
    """run(name, **constants): its results and page."""

    def run(name: str, **constants: Any) -> tuple[dict[str, list[Numbers]], str]:
        record, page, _ = run_experiment(
            name, again=CASES_BY, model=base, max_tokens=4, **constants
        )
        return record["results"], page

    return run


def test_models_are_fine_tuned_with_each_seed(run: Run) -> None:
    sizes = {"rows": 12, "questions": 2, "samples": 10, "epochs": 1, "batch_rows": 4}
    results, page = run("finetuning", **sizes)
    assert [len(results[case]) for case in (BEFORE, AFTER)] == [1, 2]
    for result in (*results[BEFORE], *results[AFTER]):
        assert len(result["right"]) == 2 and result["samples"] == 10
    first, second = results[AFTER]
    assert len(first["training_losses"]) == 3
    assert first["training_losses"] != second["training_losses"]
    assert page.count("Its pass@k has no power law to see.") == 2
    assert "| 10 | 0.0000 | 0.0000 | +0.0000 ± 0.0000 |" in page


def test_all_cases_of_grpo_sample_as_much(run: Run) -> None:
    sizes = {"steps": 1, "rollouts": (3, 6), "sampled": 6, "group_size": 4}
    results, page = run("grpo", questions=2, samples=8, **sizes)
    cases = [f"{kind} {count}" for kind in (PLAIN, BALANCED) for count in (3, 6)]
    assert list(results) == [START, *cases] and len(results[START]) == 1
    assert {len(result["rewards"]) for case in cases for result in results[case]} == {1}
    assert "| plain 3 | 2 | 6 | " in page and "| plain 6 | 1 | 6 | " in page
    assert "| balanced 3 | 2 | 4 | " in page and "| balanced 6 | 1 | 4 | " in page
    assert "Here, with 6 rollouts, pass@8 goes by" in page


def test_rollouts_are_timed_by_who_samples(run: Run) -> None:
    results, page = run("rollouts", steps=1, questions=1, rollouts=3, group_size=2)
    assert list(results) == list(CASES)
    for case, seeds in results.items():
        assert {seed["updates"] for seed in seeds} == {1} and f"\n| {case} | " in page
        assert all(seed["rollout_tokens_per_s"] > 0 for seed in seeds)
    assert all(result["overlap_share"] == 0 for result in results["torch, in turn"])


def test_generated_questions_are_different_and_their_answers_right() -> None:
    rows = list(generated(300, seed=3))
    assert len({row["question"] for row in rows}) == 300 and rows == list(generated(300, 3))
    for row in rows:
        question = Question(row["question"], row["answer"])
        assert gsm8k_strict(row["answer"], question) == 1
        lines = re.findall(r"<<([0-9+*]+)=([0-9]+)>>", row["answer"])
        assert len(lines) == 2 and all(eval(sum_) == int(message) for sum_, message in lines)


def test_gains_are_by_question_and_their_error_too() -> None:
    """Two seeds after, whose mean counts; one question gains 0.5 and one 0.1."""
    before = rates([{"right": [0, 4], "samples": 10}], [1])
    seeds = [{"right": [4, 5], "samples": 10}, {"right": [6, 5], "samples": 10}]
    assert gain(before[:, 0], rates(seeds, [1])[:, 0]) == "+0.3000 ± 0.2000"
    assert powers(1_000) == [1, 10, 100, 1_000] and powers(256) == [1, 10, 100, 256]


def test_a_power_law_is_found_where_there_is_one() -> None:
    ks = spaced(1_000)
    rights = np.random.default_rng(0).beta(0.4, 2, 200) * 1_000
    one: Numbers = {"right": rights.astype(int).tolist(), "samples": 1_000}
    message = law([one], 1_000)
    fitted = fit(ks, rates([one], ks).mean(axis=0))
    assert fitted is not None
    assert f"a = {fitted.a:.3f} (" in message and f"b = {fitted.b:.3f} (" in message


def test_the_paper_is_agreed_with_or_not() -> None:
    config = Settings(rollouts=(5, 50), samples=256)
    gained = {"plain 50": np.array([0.1, -0.02]), "balanced 50": np.array([0.1, 0.01])}
    message = agreement(config, gained)
    assert message.count("(as in the paper)") == 2
    assert "pass@256 goes by +0.0100 balanced" in message
    for change, message in ((0.01, "by +0.0100 plain (against the paper)"),
                         (0.0, "by +0.0000 plain (unchanged, unlike in the paper)")):  # fmt: skip
        assert message in agreement(config, gained | {"plain 50": np.array([0.1, change])})


def result(right: list[int], known: list[int]) -> Numbers:
    """Return a result of two updates; problems have ten samples, a third of the time is waiting."""
    times = {"seconds": [2.0, 4.0], "waited": [1.0, 1.0], "tokens": [50, 70]}
    learned = {"rewards": [0.25, 0.75], "mixed": [1.0, 0.5], "trl": "1", "torch": "2"}
    return {"right": right, "known": known, "samples": 10, **times, **learned}


RESULTS = {
    trainers.START: [result([1, 3], [2, 2])],
    trainers.TRL: [result([4, 6], [8, 8]), result([6, 8], [8, 8])],
    trainers.SRM: [result([4, 8], [2, 4]), result([4, 8], [2, 4])],
}


def test_differences_within_the_errors_agree() -> None:
    """By problem 0.1 and -0.1, whose mean has an error of 0.1; TRL's seeds solve 0.5 and 0.7, which
    is an error of 0.1 too, and ours the same."""
    sentence = trainers.agreement(RESULTS)
    assert "0.0000 ± 0.1414 of held-out problems, within 2 errors" in sentence
    assert "+0.5000 ± 0.1000 of those learned from, beyond 2 errors" in sentence


def test_the_trainers_page_has_results_and_times() -> None:
    text = "\n".join(trainers.page(trainers.Settings(), RESULTS))
    assert "| TRL | 0.6000 | +0.4000 ± 0.0000 | 0.5000, 0.7000 | 0.8000 | +0.6000" in text
    assert "| start | 0.2000 | – | – | 0.2000 | – | – |" in text
    assert (
        "| srm train grpo | 3.00, 3.00 | 1.00, 1.00 | 33% (33% … 33%) | 60 | 0.500 | 0.500 | 75% |"
        in text
    )
