"""Countdown puzzles of seven numbers: what can be made, what is drawn, learned and judged."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import numpy as np
import pytest

from research.experiments.tasks import large_puzzles
from research.experiments.tasks.large_puzzles import (
    BEGIN,
    BOUNDS,
    END,
    LONGEST,
    VOCABULARY,
    LargeBatches,
    Reach,
    draw_even,
)
from research.experiments.tasks.tasks import LargeCountdownTask
from srm.tokenizer_file import read_tokenizer
from srm.training.data import IGNORED
from srm.training.problems.countdown import Countdown, combine, expression_of, is_solved
from srm.training.text.tokenizer import special_ids


def made(numbers: tuple[int, ...]) -> set[int]:
    """All that numbers make with whole positive results between, step by step."""
    if len(numbers) == 1:
        return set(numbers)
    results = set()
    for a, b, *rest in permutations(numbers):
        values = {a + b, a - b, a * b} | ({a // b} if a % b == 0 else set())
        for value in values:
            if value >= 1:
                results |= made((value, *rest))
    return results


@pytest.mark.parametrize("listed", [2, 5])
def test_reach_is_what_all_combinations_make(listed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether results of most numbers are listed, or searched from the target."""
    monkeypatch.setattr(large_puzzles, "LISTED", listed)
    for numbers in ((3, 7, 25, 4), (2, 2, 9, 10), (1, 100, 50, 8)):
        reach, expected = Reach(numbers), {value for value in made(numbers) if value < 3_000}
        assert {target for target in range(1, 3_000) if target in reach} == expected


def test_even_puzzles_are_held_out_and_can_be_made() -> None:
    puzzles = draw_even(np.random.default_rng(5), 30)
    assert len(puzzles) == 30 and puzzles == draw_even(np.random.default_rng(5), 30)
    for puzzle in puzzles:
        assert puzzle.is_held_out and len(puzzle.numbers) == 7
        assert BOUNDS.least <= puzzle.target <= BOUNDS.largest
    assert all(puzzle.target in Reach(puzzle.numbers) for puzzle in puzzles)
    # Random combinations make targets below 100,000 in half of the cases.
    assert np.mean([puzzle.target < 100_000 for puzzle in puzzles]) < 0.4


def test_batches_have_solutions_of_puzzles_that_are_not_held_out() -> None:
    batches = LargeBatches(3, 2_000)
    for inputs, targets, is_held_out in (
        (*batches[0], False),
        (*batches[7], False),
        (*batches.evaluation(1)[0], True),
    ):
        assert inputs.shape == targets.shape and inputs.shape[1] < LONGEST
        for row, learned in zip(inputs.tolist(), targets.tolist(), strict=True):
            prompt, _, _ = " ".join(VOCABULARY[token] for token in row[1:]).partition(":")
            target, numbers = prompt.removeprefix("make").split("of")
            puzzle = Countdown(tuple(map(int, numbers.split())), int(target.replace(" ", "")))
            answer = [token for token in learned if token != IGNORED]
            assert learned[row.index(VOCABULARY.index(":"))] == answer[0] and answer[-1] == END
            assert is_solved(puzzle, " ".join(VOCABULARY[token] for token in answer[:-1]))
            assert puzzle.is_held_out == is_held_out and puzzle.target >= BOUNDS.least
    assert batches[0][0].equal(LargeBatches(3, 2_000)[0][0])
    assert not batches[0][0].equal(batches[1][0])


def test_answers_are_judged_and_guessed(tmp_path: Path) -> None:
    numbers = (100, 90, 3, 2, 2, 1, 1)
    solved = combine(np.random.default_rng(0), np.tile(numbers, (10_000, 1)), False, BOUNDS)
    target = int(np.bincount(solved.target).argmax())
    task = LargeCountdownTask([Countdown(numbers, target), Countdown(numbers, target + 1)])
    path = tmp_path / "tokenizer.json"
    path.write_text(task.tokenizer.to_str())
    tokenizer = read_tokenizer(path)
    assert special_ids(tokenizer) == (task.begin, task.end) == (BEGIN, END)
    problem = task.problems[0]
    assert tokenizer.encode(problem.prompt).ids == problem.ids and problem.ids[0] == BEGIN
    solved = solved.where(solved.target == target)
    ids = large_puzzles.parse_ids(expression_of(solved.steps[0].tolist()))
    assert problem.is_right([*ids, END]) and not problem.is_right([*ids])
    assert not problem.is_right([END]) and not problem.is_right([])
    assert not problem.is_right([*ids, *large_puzzles.parse_ids("+1"), END])
    assert not problem.is_right([*large_puzzles.parse_ids("1 0 0"), *ids[1:], END])
    assert not task.problems[1].is_right([*ids, END])
    right = task.guess(10_000, 0)
    assert right == task.guess(10_000, 0)
    assert right[0] == pytest.approx(len(solved.target), rel=0.3), "as often as above"
