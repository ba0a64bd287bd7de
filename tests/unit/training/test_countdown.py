"""Countdown: what is drawn is right in every form, what is wrong is found, and splits are apart."""

from __future__ import annotations

import numpy as np
import pytest

from srm.training.problems import countdown
from srm.training.problems.countdown import (
    EOS,
    VOCABULARY,
    Countdown,
    Form,
    SolvedPuzzles,
    is_solved,
)

GIVEN = Countdown((25, 3, 7, 4), 64)


def _drawn(seed: int, size: int, is_chain: bool) -> SolvedPuzzles:
    return countdown.draw(np.random.default_rng(seed), 300, size, is_chain)


def _problems(solved: SolvedPuzzles) -> list[Countdown]:
    pairs = zip(solved.numbers.tolist(), solved.target.tolist(), strict=True)
    return [Countdown(tuple(numbers), target) for numbers, target in pairs]


@pytest.mark.parametrize("size", countdown.SIZES)
@pytest.mark.parametrize("form", ["chain", "steps", "pool", "direct"])
def test_written_answers_are_right_and_those_of_other_problems_wrong(form: Form, size: int) -> None:
    solved = _drawn(1, size, form == "chain")
    ids, start, lengths = countdown.write(solved, form)
    assert len(ids) > 50
    for problem, row, length in zip(_problems(solved), ids.tolist(), lengths, strict=True):
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
    first, again, other = (_problems(_drawn(seed, 5, True)) for seed in (3, 3, 4))
    assert first == again != other


def test_one_in_many_is_held_out_whatever_the_order_of_its_numbers() -> None:
    solved = countdown.draw(np.random.default_rng(0), 40_000, 6, False)
    is_held_out = countdown.held_out(solved.numbers, solved.target)
    assert 0.8 < is_held_out.mean() * countdown.HELD_OUT_SHARE < 1.2
    turned = countdown.held_out(solved.numbers[:, ::-1], solved.target)
    assert (turned == is_held_out).all()
    assert _problems(solved)[0].is_held_out == is_held_out[0]
