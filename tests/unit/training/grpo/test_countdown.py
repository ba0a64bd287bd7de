"""Countdown: what is drawn is right in every form, what is wrong is found, and splits are apart."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from srm.tokenizer_file import read_tokenizer
from srm.training.data import IGNORED, CountdownBatches
from srm.training.problems import countdown
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
from srm.training.questions.questions import Question
from srm.training.questions.rewards import countdown as countdown_reward
from srm.training.text.tokenizer import special_ids

GIVEN = Countdown((25, 3, 7, 4), 64)


def _drawn(seed: int, size: int, is_chain: bool) -> SolvedPuzzles:
    return countdown.draw(np.random.default_rng(seed), 300, size, is_chain)


@pytest.mark.parametrize("size", countdown.SIZES)
@pytest.mark.parametrize("form", ["chain", "steps", "pool", "direct"])
def test_written_answers_are_right_and_those_of_other_problems_wrong(form: Form, size: int) -> None:
    solved = _drawn(1, size, form == "chain")
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


@pytest.mark.parametrize(
    "answer",
    ["25*3-7-4", "(25*3)-(7+4)", "25*3=75-7=68-4=64", "7+4=11 25*3=75 75-11=64"],
)
def test_right_answers(answer: str) -> None:
    assert is_solved(GIVEN, answer)


@pytest.mark.parametrize(
    "answer",
    [
        *("", "64", "64=64", "25*3-7-4+", "25*3-7-(4", "25*3)-7-4", "25 3 7 4", "25*3-7-2-2"),
        *("25*3=75-7=68-4=65", "25*3=75-7=68", "25*3=76-7=69-5=64", "25*3=75 75-7=68 68-4=64 64"),
        *(
            "25*3=75-7=68-4=64-64=0",
            "25/0*3-7-4",
            "25*3-7-4=64",
            "__import__('os')",
            "(" * 9_999,
            "²5*3-7-4",
        ),
    ],
)
def test_wrong_answers(answer: str) -> None:
    assert not is_solved(GIVEN, answer)


def test_problems_are_a_function_of_the_seed() -> None:
    first, again, other = (_drawn(seed, 5, True).problems for seed in (3, 3, 4))
    assert first == again != other


def test_one_in_many_is_held_out_whatever_the_order_of_its_numbers() -> None:
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


def test_the_tokenizer_has_the_ids_of_the_vocabulary_and_is_served(tmp_path: Path) -> None:
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
        lengths.add(int((inputs[0] == countdown.COLON).nonzero()[0]))
        assert inputs.shape == targets.shape and inputs.shape[1] < countdown.LONGEST
        for row, target in zip(inputs.tolist(), targets.tolist(), strict=True):
            begun = row.index(countdown.COLON)
            prompt = " ".join(VOCABULARY[token] for token in row[1 : begun + 1])
            answer = target[begun : target.index(EOS)]
            assert set(target[:begun]) == {IGNORED} and set(target[target.index(EOS) + 1 :]) <= {
                IGNORED
            }
            problem = parse_prompt(prompt)
            assert is_solved(problem, " ".join(VOCABULARY[token] for token in answer))
            assert not problem.is_held_out
    assert lengths == {size + 4 for size in countdown.SIZES}
    for inputs, _ in batches.evaluation(3):
        row = inputs[0].tolist()
        prompt = " ".join(VOCABULARY[token] for token in row[1 : row.index(countdown.COLON) + 1])
        assert parse_prompt(prompt).is_held_out
