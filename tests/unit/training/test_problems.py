"""Problems are right, deterministic, and split without overlap, those of Countdown too."""

from __future__ import annotations

import operator
import random
import re
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from srm.tokenizer_file import read_tokenizer
from srm.training.data import IGNORED, CountdownBatches
from srm.training.problems import countdown, words
from srm.training.problems.countdown import (
    BOS,
    EOS,
    VOCABULARY,
    Countdown,
    Form,
    SolvedPuzzles,
    is_solved,
    parse_prompt,
)
from srm.training.problems.countdown_tokenizer import countdown_tokenizer
from srm.training.problems.drawn import KINDS, Split, examples, instruction, problems
from srm.training.problems.problem import Problem, extract_answer, reward
from srm.training.questions.questions import Question
from srm.training.questions.rewards import countdown as countdown_reward
from srm.training.text.tokenizer import special_ids

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


GIVEN = Countdown((25, 3, 7, 4), 64)


def _puzzles(seed: int, size: int, is_chain: bool) -> SolvedPuzzles:
    return countdown.draw(np.random.default_rng(seed), 300, size, is_chain)


@pytest.mark.parametrize("size", countdown.SIZES)
@pytest.mark.parametrize("form", ["chain", "steps", "pool", "direct"])
def test_written_answers_are_right_for_their_problem_alone(form: Form, size: int) -> None:
    solved = _puzzles(1, size, form == "chain")
    ids, start, lengths = countdown.write(solved, form)
    assert len(ids) > 50
    for problem, row, length in zip(solved.problems, ids.tolist(), lengths, strict=True):
        prompt, answer = row[:start], row[start : start + length]
        assert " ".join(VOCABULARY[token] for token in prompt[1:]) == problem.prompt
        assert answer[-1] == EOS and EOS not in answer[:-1]
        text = " ".join(VOCABULARY[token] for token in answer[:-1])
        assert is_solved(problem, text) and is_solved(problem, text.replace(" ", "", 1))
        assert not is_solved(Countdown(problem.numbers, problem.target + 1), text)
        assert not is_solved(Countdown((*problem.numbers, 1), problem.target), text)


RIGHT = ["25*3-7-4", "(25*3)-(7+4)", "25*3=75-7=68-4=64", "7+4=11 25*3=75 75-11=64"]
WRONG = [
    *("", "64", "64=64", "25*3-7-4+", "25*3-7-(4", "25*3)-7-4", "25 3 7 4", "25*3-7-2-2"),
    *("25*3=75-7=68-4=65", "25*3=75-7=68", "25*3=76-7=69-5=64", "25*3=75 75-7=68 68-4=64 64"),
    *("25*3=75-7=68-4=64-64=0", "25/0*3-7-4", "25*3-7-4=64", "__import__('os')", "(" * 9_999),
    "²5*3-7-4",
]


@pytest.mark.parametrize("answer", [*RIGHT, *WRONG])
def test_right_answers_are_told_from_wrong_ones(answer: str) -> None:
    assert is_solved(GIVEN, answer) == (answer in RIGHT)


def test_a_problem_is_held_out_in_any_order_of_its_numbers() -> None:
    solved = countdown.draw(np.random.default_rng(0), 40_000, 6, False)
    is_held_out = countdown.held_out(solved.numbers, solved.target)
    assert 0.8 < is_held_out.mean() * countdown.HELD_OUT_SHARE < 1.2
    turned = countdown.held_out(solved.numbers[:, ::-1], solved.target)
    assert (turned == is_held_out).all()
    assert solved.problems[0].is_held_out == is_held_out[0]


def test_a_split_is_drawn_to_the_number_asked_for() -> None:
    for is_held_out in (False, True):
        solved = countdown.draw_split(np.random.default_rng(0), 30, 4, False, is_held_out)
        assert len(solved.problems) == 30
        assert {problem.is_held_out for problem in solved.problems} == {is_held_out}


def test_a_prompt_is_read_back() -> None:
    assert parse_prompt(GIVEN.prompt) == parse_prompt(f" {GIVEN.prompt}\n") == GIVEN
    for text in ("", "make 64 of :", "make of 3 :", "make 64 of 25 3", "Make 64 of 25 3 :"):
        with pytest.raises(ValueError, match="no countdown problem"):
            parse_prompt(text)


def test_the_reward_reads_the_question() -> None:
    assert countdown_reward(" 25 * 3 - 7 - 4", Question(GIVEN.prompt, "")) == 1
    assert countdown_reward(" 25 * 3 - 7 + 4", Question(GIVEN.prompt, "")) == 0


def test_the_tokenizer_has_the_ids_of_the_vocabulary(tmp_path: Path) -> None:
    """Spaces are not read, and every number and sign is decoded behind one."""
    path = tmp_path / "tokenizer.json"
    path.write_text(countdown_tokenizer().to_str())
    tokenizer = read_tokenizer(path)
    assert special_ids(tokenizer) == (BOS, EOS)
    ids = [BOS, *countdown.parse_ids(GIVEN.prompt)]
    for prompt in (GIVEN.prompt, "make 64 of 25  3 7\n4:"):
        assert tokenizer.encode(prompt).ids == ids
    assert tokenizer.decode([*ids, EOS]) == f" {GIVEN.prompt}"
    assert tokenizer.encode("1000 é 5").ids == [BOS, len(VOCABULARY), len(VOCABULARY), 5]


@pytest.mark.parametrize("form", ["chain", "steps", "direct"])
def test_batches_have_whole_puzzles_of_which_answers_are_learned(form: Form) -> None:
    batches = CountdownBatches(1, 400, form)
    lengths = set()
    for index in range(6):
        inputs, targets = batches[index]
        again = CountdownBatches(1, 400, form)[index]
        assert torch.equal(inputs, again[0]) and torch.equal(targets, again[1])
        assert not torch.equal(inputs, CountdownBatches(2, 400, form)[index][0])
        lengths.add(int((inputs[0] == countdown.COLON).nonzero()[0]))
        assert inputs.shape == targets.shape and inputs.shape[1] < countdown.LONGEST
        for row, target in zip(inputs.tolist(), targets.tolist(), strict=True):
            begun = row.index(countdown.COLON)
            prompt = " ".join(VOCABULARY[token] for token in row[1 : begun + 1])
            answer = target[begun : target.index(EOS)]
            others = target[:begun] + target[target.index(EOS) + 1 :]
            assert set(others) == {IGNORED}
            problem = parse_prompt(prompt)
            assert is_solved(problem, " ".join(VOCABULARY[token] for token in answer))
            assert not problem.is_held_out
    assert lengths == {size + 4 for size in countdown.SIZES}
    for inputs, _ in batches.evaluation(3):
        row = inputs[0].tolist()
        prompt = " ".join(VOCABULARY[token] for token in row[1 : row.index(countdown.COLON) + 1])
        assert parse_prompt(prompt).is_held_out
