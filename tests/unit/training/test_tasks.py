"""Problems are right, deterministic, and split without overlap."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from itertools import islice

import pytest

from engine.config import DEMO_MODEL
from training.tasks import (
    GOODS,
    HOLDERS,
    KINDS,
    NAMES,
    THINGS,
    Problem,
    Split,
    extract_answer,
    problems,
    reward,
)

SPLITS: tuple[Split, Split] = ("train", "held-out")


def _drawn(split: Split, seed: int, count: int) -> list[Problem]:
    return list(islice(problems(split, seed), count))


@pytest.mark.parametrize("split", SPLITS)
def test_problems_are_a_function_of_split_and_seed(split: Split) -> None:
    assert _drawn(split, 3, 200) == _drawn(split, 3, 200)
    assert _drawn(split, 3, 200) != _drawn(split, 4, 200)


def test_splits_share_no_problem() -> None:
    train = {p.question for seed in range(5) for p in _drawn("train", seed, 5_000)}
    held_out = {p.question for p in _drawn("held-out", 0, 3_000)}
    assert not train & held_out


def test_every_kind_appears_about_equally_often() -> None:
    kinds = [p.kind for p in _drawn("train", 0, 9_000)]
    assert len(set(kinds)) == len(KINDS)
    for kind in set(kinds):
        assert 700 < kinds.count(kind) < 1_300


def test_the_model_card_has_every_wording_and_no_other() -> None:
    def wording(question: str) -> str:
        listed = "|".join((*NAMES, *THINGS, *HOLDERS, *(f"{good}s?" for good in GOODS)))
        verbs = "buys|finds|wins|is given|sells|loses|gives away|breaks"
        return re.sub(rf"\b(?:{listed}|{verbs}|\d+|more|of them)\b", "_", question)

    card = (DEMO_MODEL / "README.md").read_text()
    rows = re.findall(r"^\| ([a-z ]+) \| (.*\?) \|$", card, re.M)
    drawn = _drawn("train", 0, 300)
    assert len(rows) == len(KINDS)
    assert {kind for kind, _ in rows} == {problem.kind for problem in drawn}
    assert {wording(question) for _, question in rows} <= {wording(p.question) for p in drawn}


def test_every_step_is_true_and_the_last_is_the_answer() -> None:
    operations: dict[str, Callable[[int, int], float]] = {
        "+": operator.add,
        "-": operator.sub,
        "*": operator.mul,
        "/": operator.truediv,
    }
    for problem in _drawn("train", 1, 3_000):
        for step in problem.steps:
            match = re.fullmatch(r"(\d+) ([-+*/]) (\d+) = (\d+)", step)
            assert match, step
            a, sign, b, result = match.groups()
            assert operations[sign](int(a), int(b)) == int(result), step
        assert problem.steps[-1].endswith(f"= {problem.answer}")
        assert problem.answer >= 0


def test_every_given_number_is_in_the_question() -> None:
    for problem in _drawn("train", 2, 1_000):
        known = set(re.findall(r"\d+", problem.question))
        for step in problem.steps:
            left, result = step.split(" = ")
            assert set(re.findall(r"\d+", left)) <= known
            known.add(result)


@pytest.mark.parametrize(
    ("text", "answer"),
    [(" 3 + 4 = 7\n#### 7", 7), ("#### -12 and more", -12), ("####5", 5), ("no mark 7", None)],
)
def test_extract_answer_reads_the_number_after_the_mark(text: str, answer: int | None) -> None:
    assert extract_answer(text) == answer


def test_reward_is_one_for_the_solution_and_zero_for_another_number() -> None:
    (problem,) = _drawn("train", 5, 1)
    assert reward(problem, problem.solution) == 1.0
    assert reward(problem, problem.solution + "1") == 0.0
    assert reward(problem, "") == 0.0
