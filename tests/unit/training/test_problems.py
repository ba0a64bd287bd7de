"""Problems are right, deterministic, and split without overlap."""

from __future__ import annotations

import operator
import random
import re
from itertools import islice

import pytest

from srm.training.problems import words
from srm.training.problems.drawn import KINDS, Split, examples, instruction, problems
from srm.training.problems.problem import Problem, extract_answer, reward

SPLITS: tuple[Split, Split] = ("train", "held-out")


def _drawn(split: Split, seed: int, count: int) -> list[Problem]:
    return list(islice(problems(split, seed), count))


@pytest.mark.parametrize("split", SPLITS)
def test_problems_are_a_function_of_split_and_seed(split: Split) -> None:
    assert _drawn(split, 3, 200) == _drawn(split, 3, 200)
    assert _drawn(split, 3, 200) != _drawn(split, 4, 200)


def test_splits_share_no_problem() -> None:
    train = {p.question for seed in range(2) for p in _drawn("train", seed, 5_000)}
    held_out = {p.question for p in _drawn("held-out", 0, 500)}
    assert not train & held_out


def test_every_kind_appears_about_equally_often() -> None:
    kinds = [p.kind for p in _drawn("train", 0, 4_000)]
    assert len(set(kinds)) == len(KINDS)
    for kind in set(kinds):
        assert 280 < kinds.count(kind) < 520


def test_names_are_seldom_seen_twice() -> None:
    asked = [p.question for p in _drawn("train", 0, 2_000) if p.kind == "three friends"]
    names = [re.findall(r"\b[A-Z][a-z]+\b", question)[-2] for question in asked]
    assert len(set(names)) > 0.5 * len(names)


def test_made_words_neither_offend_nor_are_words_of_their_own() -> None:
    r = random.Random(5)
    made = {words.name(r).lower() for _ in range(30_000)} | {words.thing(r) for _ in range(30_000)}
    assert not [item for item in made if re.search("shit|fuck|cock|dick|coon|nazi|sex|cum", item)]
    assert not made & {"she", "he", "the", "we", "me"} and "robin" in made


def test_a_system_message_chooses_the_style_of_the_answer() -> None:
    (one,) = _drawn("train", 4, 1)
    assert one.prompt_with("Explain.") == f"System: Explain.\n{one.prompt}"
    assert one.solution == f" {chr(10).join(one.steps)}\n#### {one.answer}"
    assert one.solution_in("number") == f" #### {one.answer}"
    prose = one.solution_in("prose")
    assert all(step in prose for step in one.steps)
    assert prose.endswith(f".\n#### {one.answer}") and prose.count("\n") == 1
    r = random.Random(0)
    drawn = [instruction(r) for _ in range(2_000)]
    styles = {style: {system for system, own in drawn if own == style} for _, style in drawn}
    assert "" in styles["equations"]
    assert not styles["prose"] & styles["number"] and not styles["equations"] & styles["prose"]
    assert 800 < sum(not system for system, _ in drawn) < 1_200


def test_examples_are_problems_in_every_style() -> None:
    shown = list(islice(examples(3), 500))
    assert shown == list(islice(examples(3), 500))
    for problem, (prompt, solution) in zip(islice(problems("train", 3), 500), shown, strict=True):
        assert prompt.endswith(problem.prompt)
        assert solution in {problem.solution_in(s) for s in ("equations", "prose", "number")}


def test_every_step_is_true_of_given_numbers_and_the_last_is_the_answer() -> None:
    operations = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
    for problem in _drawn("train", 1, 2_000):
        assert problem.steps[-1].endswith(f"= {problem.answer}")
        assert problem.answer >= 0
        known = set(re.findall(r"\d+", problem.question))
        for step in problem.steps:
            match = re.fullmatch(r"(\d+) ([-+*/]) (\d+) = (\d+)", step)
            assert match, step
            a, sign, b, result = match.groups()
            assert operations[sign](int(a), int(b)) == int(result), step
            assert {a, b} <= known
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
