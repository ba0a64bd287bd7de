"""Countdown: make a target of some numbers, each used exactly once, by + - * /.

A problem reads "make 64 of 25 3 7 9 4 :" and one of its answers "25 * 3 = 75 ...". A token is a
whole number or a sign. Problems are drawn by the thousand in numpy, by the seed alone; one whose
numbers and target hash into the held-out class is never trained on, in whatever order it is put.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Form = Literal["chain", "steps", "pool", "direct"]
"""How an answer is written: "25*3=75-7=68", each step going on with the last result; "25*3=75
75-7=68", any two of the numbers left; the same with those left after each step; or "25*3-7"."""

SIGNS = ("+", "-", "*", "/")
LARGEST = 999
"""Largest number that is a token; also the largest target and result of a step."""
LEAST_TARGET = 100
LARGEST_GIVEN = 100
SIZES = (4, 5, 6)
"""How many numbers are given; as the next three bounds those of `reasoning_gym`."""
_WEIGHTS = np.array([1, 1, 3, 3])
"""How often each sign is drawn where it is possible: * and / seldom are."""
WORDS = (*SIGNS, "=", "(", ")", ":", ";", "make", "of", "<s>", "</s>")
PLUS, MINUS, TIMES, OVER, EQUALS, OPEN, CLOSE, COLON, SEMICOLON, MAKE, OF, BOS, EOS = range(
    LARGEST + 1, LARGEST + 1 + len(WORDS)
)
"""Token ids; that of a number is the number."""
VOCABULARY = (*map(str, range(LARGEST + 1)), *WORDS)
HELD_OUT_SHARE = 64
"""One problem in this many is held out."""
LONGEST = 1 + 6 * SIZES[-1]
"""Most tokens of a problem with its answer in any form but a pool, begin and end token included."""
_TOKENS = re.compile(r"\d+|[a-z]+|\S")
_IDS = {word: token for token, word in enumerate(VOCABULARY)}
_PROMPT = re.compile(r"make (\d+) of (\d+(?: \d+)*) :")


class Bounds(NamedTuple):
    """Bounds of targets; the upper one is also that of results of steps."""

    least: int
    largest: int


USUAL = Bounds(LEAST_TARGET, LARGEST)


@dataclass(frozen=True)
class Countdown:
    """A problem; `prompt` is what it reads."""

    numbers: tuple[int, ...]
    target: int

    @property
    def prompt(self) -> str:
        return f"make {self.target} of {' '.join(map(str, self.numbers))} :"

    @property
    def is_held_out(self) -> bool:
        return bool(held_out(np.array([self.numbers]), np.array([self.target]))[0])


@dataclass(frozen=True)
class SolvedPuzzles:
    """Problems of one size with a solution each."""

    numbers: Ints
    """[problems, size], in the order in which they are given."""
    target: Ints
    """[problems]"""
    steps: Ints
    """[problems, size - 1, 4]: first number, sign (0 … 3), second number, result."""

    @property
    def problems(self) -> list[Countdown]:
        """The problems without their solutions."""
        pairs = zip(self.numbers.tolist(), self.target.tolist(), strict=True)
        return [Countdown(tuple(numbers), target) for numbers, target in pairs]

    def where(self, chosen: NDArray[np.bool_]) -> SolvedPuzzles:
        return SolvedPuzzles(self.numbers[chosen], self.target[chosen], self.steps[chosen])


def held_out(numbers: Ints, target: Ints) -> NDArray[np.bool_]:
    """Return which problems are held out, whatever the order of their numbers [problems, size]."""
    mixed = target.astype(np.uint64)
    with np.errstate(over="ignore"):
        for column in np.sort(numbers, axis=1).astype(np.uint64).T:
            mixed = (mixed ^ column) * np.uint64(0x9E3779B97F4A7C15)
            mixed ^= mixed >> np.uint64(29)
    is_held_out: NDArray[np.bool_] = mixed % np.uint64(HELD_OUT_SHARE) == 0
    return is_held_out


def draw(random: np.random.Generator, count: int, size: int, is_chain: bool) -> SolvedPuzzles:
    """Draw `count` problems and combine their numbers at random; return those that come out at a
    target in bounds. In a chain each step goes on with the result of the last."""
    numbers = random.integers(1, LARGEST_GIVEN + 1, (count, size))
    return combine(random, numbers, is_chain)


def draw_split(
    random: np.random.Generator, count: int, size: int, is_chain: bool, is_held_out: bool = False
) -> SolvedPuzzles:
    """Draw exactly `count` problems that are, or are not, held out."""
    parts: list[SolvedPuzzles] = []
    left = count
    while left > 0:
        some = draw(random, 4 * count, size, is_chain)
        parts.append(some.where(held_out(some.numbers, some.target) == is_held_out))
        left -= len(parts[-1].target)
    numbers, target, steps = (
        np.concatenate([getattr(part, name) for part in parts])[:count]
        for name in ("numbers", "target", "steps")
    )
    return SolvedPuzzles(numbers, target, steps)


def parse_prompt(prompt: str) -> Countdown:
    """Read a problem's prompt. Raises ValueError for what is none."""
    match = _PROMPT.fullmatch(prompt.strip())
    if match is None:
        raise ValueError(f"no countdown problem: {prompt!r:.100}")
    return Countdown(tuple(map(int, match[2].split())), int(match[1]))


def combine(
    random: np.random.Generator, numbers: Ints, is_chain: bool, bounds: Bounds = USUAL
) -> SolvedPuzzles:
    """Combine the numbers [problems, size] at random; return those with a target in bounds."""
    count, size = numbers.shape
    rows, left = np.arange(count), random.permuted(numbers, axis=1)
    steps = np.zeros((count, size - 1, 4), np.int64)
    for step in range(size - 1):
        last = size - 1 - step  # of the numbers left
        i = np.zeros(count, np.int64) if is_chain else random.integers(0, last + 1, count)
        j = (i + random.integers(1, last + 1, count)) % (last + 1)
        a, b = left[rows, i], left[rows, j]
        if not is_chain:
            a, b = np.maximum(a, b), np.minimum(a, b)
        results = np.stack([a + b, a - b, a * b, a // np.maximum(b, 1)], 1)
        possible = (results >= 1) & (results <= bounds.largest)
        possible[:, 3] &= a % np.maximum(b, 1) == 0
        drawn = random.random((count, 4)) ** (1 / _WEIGHTS)
        sign = np.where(possible, drawn, -1.0).argmax(1)
        result = np.where(possible[rows, sign], results[rows, sign], 0)  # 0: cannot go on
        steps[:, step] = np.stack([a, sign, b, result], 1)
        left[rows, i] = result
        left[rows, j] = left[:, last]
        if is_chain:
            left[:, 0] = result
    target = steps[:, -1, 3]
    is_valid = (steps[:, :, 3] > 0).all(1) & (target >= bounds.least)
    return SolvedPuzzles(numbers, target, steps).where(is_valid)


def write(solved: SolvedPuzzles, form: Form) -> tuple[Ints, int, Ints]:
    """Return ids [problems, length] of prompts and answers, behind which stand end tokens; the
    length of the prompts; and that of each problem's answer with its end token."""
    count, size = solved.numbers.shape

    def column(token: int) -> Ints:
        return np.full((count, 1), token)

    prompt = [column(BOS), column(MAKE), solved.target[:, None], column(OF), solved.numbers]
    prompt.append(column(COLON))
    length = size + 5
    if form == "direct":
        written = [parse_ids(expression_of(steps)) for steps in solved.steps.tolist()]
        ids = np.full((count, 4 * size), EOS)
        for row, expression in zip(ids, written, strict=True):
            row[: len(expression)] = expression
        lengths = np.array([len(expression) + 1 for expression in written], np.int64)
        return np.concatenate([*prompt, ids], 1), length, lengths
    answer: list[Ints] = []
    left = solved.numbers
    for step in range(size - 1):
        a, sign, b, result = (solved.steps[:, step, part, None] for part in range(4))
        if form != "chain" or not step:
            answer.append(a)
        answer += [sign + PLUS, b, column(EQUALS), result]
        if form == "pool" and step < size - 2:
            left = _without(_without(left, a), b)
            left = np.sort(np.concatenate([left, result], 1), axis=1)
            answer += [column(COLON), left, column(SEMICOLON)]
    ids = np.concatenate([*answer, column(EOS)], 1)
    return np.concatenate([*prompt, ids], 1), length, np.full(count, ids.shape[1])


def _without(numbers: Ints, removed: Ints) -> Ints:
    """Remove the first of each row's numbers that equals `removed` [rows, 1]."""
    is_kept = np.ones(numbers.shape, bool)
    is_kept[np.arange(len(numbers)), (numbers == removed).argmax(1)] = False
    return numbers[is_kept].reshape(len(numbers), -1)


def parse_ids(text: str) -> list[int]:
    """Return the ids of the numbers and signs of an expression."""
    return [_IDS[token] for token in _TOKENS.findall(text)]


def expression_of(steps: Sequence[Sequence[int]]) -> str:
    """Write steps as one expression, with as few brackets as it needs."""
    made: dict[int, list[tuple[str, int]]] = {}  # expressions by value, with their last sign

    def operand(value: int) -> tuple[str, int]:
        return made[value].pop() if made.get(value) else (str(value), -1)

    text = ""
    for a, sign, b, result in steps:
        (left, left_sign), (right, right_sign) = operand(a), operand(b)
        if sign >= 2 and left_sign in (0, 1):
            left = f"({left})"
        if (right_sign in (0, 1) and sign != 0) or (right_sign >= 2 and sign == 3):
            right = f"({right})"
        text = f"{left}{SIGNS[sign]}{right}"
        made.setdefault(result, []).append((text, sign))
    return text


def is_solved(problem: Countdown, answer: str) -> bool:
    """Whether the answer is right, in whichever form: exactly the numbers given, each step right,
    and the target at the end."""
    tokens = _TOKENS.findall(answer)
    try:
        if "=" not in tokens:
            numbers = sorted(int(token) for token in tokens if token.isdigit())
            return numbers == sorted(problem.numbers) and evaluate(tokens) == problem.target
        return _is_reached(problem, list(_steps(tokens)))
    except (ValueError, ZeroDivisionError, RecursionError):
        return False


def _is_reached(problem: Countdown, steps: list[tuple[int, str, int, int]]) -> bool:
    left = Counter(problem.numbers)
    for a, sign, b, result in steps:
        used = Counter([a, b])
        if used - left or evaluate([str(a), sign, str(b)]) != result:
            return False
        left = left - used + Counter([result])
    return left == Counter([problem.target])


def _steps(tokens: Sequence[str]) -> Iterator[tuple[int, str, int, int]]:
    """Yield the steps of an answer; what a pool says is passed over."""
    rest, result = iter(tokens), ""
    for token in rest:
        if token == ":":
            while next(rest, ";") != ";":
                pass
            continue
        first, sign = (result, token) if token in SIGNS else (token, next(rest, ""))
        second, equals, result = next(rest, ""), next(rest, ""), next(rest, "")
        if equals != "=":
            raise ValueError("no step")
        yield int(first), sign, int(second), int(result)


def evaluate(tokens: Sequence[str]) -> Fraction:
    """Return the value of an expression. Raises ValueError for what is none, and
    ZeroDivisionError."""
    rest = list(reversed(tokens))
    value = _sum(rest)
    if rest:
        raise ValueError("goes on behind its end")
    return value


def _sum(rest: list[str]) -> Fraction:
    value = _product(rest)
    while rest and rest[-1] in "+-":
        value = value + _product(rest) if rest.pop() == "+" else value - _product(rest)
    return value


def _product(rest: list[str]) -> Fraction:
    value = _operand(rest)
    while rest and rest[-1] in "*/":
        value = value * _operand(rest) if rest.pop() == "*" else value / _operand(rest)
    return value


def _operand(rest: list[str]) -> Fraction:
    token = rest.pop() if rest else ""
    if token == "(":
        value = _sum(rest)
        if not rest or rest.pop() != ")":
            raise ValueError("a bracket is not closed")
        return value
    return Fraction(int(token))
