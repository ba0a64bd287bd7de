"""Countdown puzzles that guesses seldom solve: seven numbers, and targets of five and six digits.

Those to answer have targets drawn evenly from those that their numbers can make. Random
combinations make easy targets most often, and a guess is one of them: what they solve of puzzles
that they drew says little. Puzzles to learn come with a solution each, by the thousand, and so are
random combinations, but as often of large targets as of small ones. The digits of a target are
tokens, and so are the numbers up to 100: a small model copies seven numbers soon where each is one,
and not for long where they are digits.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import combinations, islice

import numpy as np
from torch import Tensor

from srm.training.finetuning.examples import Example, padded
from srm.training.problems.countdown import (
    LARGEST_GIVEN,
    WORDS,
    Bounds,
    Countdown,
    Ints,
    combine,
    expression_of,
    held_out,
)

BOUNDS = Bounds(10_000, 999_999)
SIZE = 7
VOCABULARY = (*map(str, range(LARGEST_GIVEN + 1)), *WORDS)
IDS = {word: token for token, word in enumerate(VOCABULARY)}
BEGIN, END = IDS["<s>"], IDS["</s>"]
LONGEST = 41
"""Most tokens of a puzzle with its answer, begin and end token included: 17 of a prompt, and 7
numbers, 6 signs, 10 brackets and an end token."""
MEAN_LENGTH = 33
TRIED = 2_048
"""Targets that are drawn for the same numbers; those of which none can be made are left out."""
LISTED = 5
"""Most numbers whose results are listed; what more of them make is searched from the target."""


def parse_ids(text: str) -> list[int]:
    """Return the ids of a prompt or an expression."""
    return [IDS[token] for token in re.findall(r"\d+|[a-z]+|\S", text)]


def prompt_of(puzzle: Countdown) -> str:
    """Return the prompt, in which a target is its digits: "make 1 2 9 5 8 of 11 49 18 :"."""
    return f"make {' '.join(str(puzzle.target))} of {' '.join(map(str, puzzle.numbers))} :"


def draw_even(random: np.random.Generator, count: int) -> list[Countdown]:
    """Draw held-out puzzles with targets that are drawn evenly from those that can be made."""
    puzzles: list[Countdown] = []
    while len(puzzles) < count:
        numbers = tuple(random.integers(1, LARGEST_GIVEN + 1, SIZE).tolist())
        targets = random.integers(BOUNDS.least, BOUNDS.largest + 1, TRIED)
        is_held_out = held_out(np.tile(numbers, (TRIED, 1)), targets)
        reach = Reach(numbers)
        made = (target for target in targets[is_held_out].tolist() if target in reach)
        puzzles += [Countdown(numbers, target) for target in islice(made, 1)]
    return puzzles


class LargeBatches:
    """Batches of about `tokens` tokens, a puzzle a row, of which the answers are learned: inputs
    and targets, int64 [rows, length]. None is held out."""

    def __init__(self, seed: int, tokens: int) -> None:
        self._seed, self._rows = seed, max(1, tokens // MEAN_LENGTH)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._batch((self._seed, index), is_held_out=False)

    def evaluation(self, count: int) -> list[tuple[Tensor, Tensor]]:
        """Return batches of held-out puzzles, the same ones for every model."""
        return [self._batch((1, index), is_held_out=True) for index in range(count)]

    def _batch(self, seed: tuple[int, int], is_held_out: bool) -> tuple[Tensor, Tensor]:
        random, examples = np.random.default_rng(seed), list[Example]()
        while len(examples) < self._rows:
            shape = 8 * self._rows * (64 if is_held_out else 1), SIZE
            numbers = random.integers(1, LARGEST_GIVEN + 1, shape)
            solved = combine(random, numbers, False, BOUNDS)
            # Combinations make targets of each power of two about as often.
            is_drawn = random.random(len(solved.target)) < solved.target / BOUNDS.largest
            is_drawn &= held_out(solved.numbers, solved.target) == is_held_out
            solved = solved.where(is_drawn)
            for puzzle, steps in zip(solved.problems, solved.steps.tolist(), strict=True):
                prompt = [BEGIN, *parse_ids(prompt_of(puzzle))]
                ids = np.array([*prompt, *parse_ids(expression_of(steps)), END], np.int32)
                examples.append(Example(ids, np.arange(len(ids)) >= len(prompt)))
        return padded(examples[: self._rows])


class Reach:
    """The targets that numbers can make where each is used once and no step's result is beyond
    `_within`."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._values = {1 << place: np.array([number]) for place, number in enumerate(numbers)}
        for size in range(2, LISTED + 1):
            for bits in combinations(range(len(numbers)), size):
                mask = sum(1 << bit for bit in bits)
                made = [_made(*(self._values[part] for part in both)) for both in _parts(mask)]
                self._values[mask] = np.unique(np.concatenate(made))
        self._all = (1 << len(numbers)) - 1

    def __contains__(self, target: int) -> bool:
        return self._can_make(self._all, np.array([target]))

    def _can_make(self, mask: int, targets: Ints) -> bool:
        """Whether the numbers of a mask make one of the targets."""
        if mask in self._values:
            return bool(np.isin(targets, self._values[mask]).any())
        return any(
            self._can_make(more, _before(targets, self._values[few])) for few, more in _parts(mask)
        )


def _parts(mask: int) -> list[tuple[int, int]]:
    """Return the ways to divide a mask in two, the part of fewer numbers first."""
    pairs, part = [], (mask - 1) & mask
    while part:
        if (part.bit_count(), part) < ((mask ^ part).bit_count(), mask ^ part):
            pairs.append((part, mask ^ part))
        part = (part - 1) & mask
    return pairs


def _made(a: Ints, b: Ints) -> Ints:
    """Return what one of `a` and one of `b` make."""
    a, b = a[:, None], b[None]
    return _within(a + b, a - b, b - a, a * b, a // b * (a % b == 0), b // a * (b % a == 0))


def _before(targets: Ints, b: Ints) -> Ints:
    """Return the numbers that make one of the targets with one of `b`, in a last step."""
    t, b = targets[:, None], b[None]
    return _within(t - b, t + b, b - t, t * b, t // b * (t % b == 0), b // t * (b % t == 0))


def _within(*values: Ints) -> Ints:
    joined = np.concatenate([value.ravel() for value in values])
    return np.unique(joined[(joined >= 1) & (joined <= BOUNDS.largest)])
