"""Arithmetic word problems in English with step-by-step answers, in the form of GSM8K.

Everything is a function of (seed, index). A problem whose text hashes into the held-out class is
never used for training and every held-out problem is in it, so the two splits share no problem.
Nine kinds, graded from one step to four. Knows no tokens and no model.
"""

from __future__ import annotations

import hashlib
import operator
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

Split = Literal["train", "held-out"]

HELD_OUT_SHARE = 64
"""One problem in this many is held out."""

NAMES = (
    "Ava Ben Cara Dan Ella Finn Grace Hugo Iris Jack Kate Liam Maya Noah Olive Paul Quinn Rosa "
    "Sam Tara Uma Vera Will Zoe Adam Beth Carl Dora Eric Fay Gina Hans Ida Joel Karen Leo Mona "
    "Nick Oscar Pia Ravi Sara Tom Vik Wendy Yara"
).split()
THINGS = (
    "apples pears plums lemons shells stamps coins cards pens pencils books marbles buttons "
    "stickers beads cakes muffins cookies eggs flowers pebbles candles ribbons balloons peaches "
    "cherries nuts badges posters seeds"
).split()
HOLDERS = "boxes bags baskets shelves trays jars crates drawers".split()
GOODS = "ticket notebook lamp kite puzzle hat scarf cup brush toy ball mug pillow rope".split()
OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv}


@dataclass(frozen=True)
class Problem:
    """`prompt` ends with "Answer:"; `solution` ends with the line "#### <number>"."""

    kind: str
    question: str
    steps: tuple[str, ...]
    answer: int

    @property
    def prompt(self) -> str:
        return f"Question: {self.question}\nAnswer:"

    @property
    def solution(self) -> str:
        return " " + "\n".join((*self.steps, f"#### {self.answer}"))

    @property
    def is_held_out(self) -> bool:
        digest = hashlib.sha256(self.question.encode()).digest()
        return int.from_bytes(digest[:8], "little") % HELD_OUT_SHARE == 0


def problems(split: Split, seed: int) -> Iterator[Problem]:
    """Yield problems without end, distinct by chance; the same for the same split and seed."""
    random_ = random.Random(f"{split}-{seed}")
    while True:
        problem = random_.choice(KINDS)(random_)
        if problem.is_held_out == (split == "held-out"):
            yield problem


def extract_answer(text: str) -> int | None:
    """Return the number after the first "####", or None."""
    match = re.search(r"####\s*(-?\d+)", text)
    return int(match.group(1)) if match else None


def reward(problem: Problem, text: str) -> float:
    """Return 1.0 if `text` gives the right answer, else 0.0."""
    return float(extract_answer(text) == problem.answer)


def _problem(kind: str, question: str, *steps: tuple[int, str, int]) -> Problem:
    """Write out each step `a sign b`; the last one makes the answer."""
    results = [OPERATIONS[sign](a, b) for a, sign, b in steps]
    lines = [f"{a} {sign} {b} = {r}" for (a, sign, b), r in zip(steps, results, strict=True)]
    return Problem(kind, question, tuple(lines), results[-1])


def _number(r: random.Random) -> int:
    """Draw a number: often below a hundred, often in the hundreds."""
    return r.randint(2, 99) if r.random() < 0.6 else r.randint(100, 500)


def _gain(r: random.Random) -> Problem:
    name, thing, a, b = r.choice(NAMES), r.choice(THINGS), _number(r), _number(r)
    verb = r.choice(["buys", "finds", "wins", "is given"])
    question = f"{name} has {a} {thing} and {verb} {b} more. How many {thing} does {name} have now?"
    return _problem("gain", question, (a, "+", b))


def _loss(r: random.Random) -> Problem:
    name, thing, a = r.choice(NAMES), r.choice(THINGS), _number(r) + 8
    b = r.randint(2, a - 1)
    verb = r.choice(["sells", "loses", "gives away", "breaks"])
    question = f"{name} has {a} {thing} and {verb} {b} of them. How many {thing} are left?"
    return _problem("loss", question, (a, "-", b))


def _groups(r: random.Random) -> Problem:
    name, thing, holder = r.choice(NAMES), r.choice(THINGS), r.choice(HOLDERS)
    a, b = r.randint(2, 12), r.randint(2, 25)
    question = f"{name} has {a} {holder} with {b} {thing} each. How many {thing} is that in all?"
    return _problem("groups", question, (a, "*", b))


def _groups_then_change(r: random.Random) -> Problem:
    name, thing, holder = r.choice(NAMES), r.choice(THINGS), r.choice(HOLDERS)
    a, b = r.randint(2, 12), r.randint(2, 20)
    if r.random() < 0.5:
        c, sign = r.randint(1, a * b - 1), "-"
        change = f"gives away {c} of them"
    else:
        c, sign = _number(r), "+"
        change = f"buys {c} more"
    question = (
        f"{name} has {a} {holder} with {b} {thing} each and {change}. "
        f"How many {thing} does {name} have now?"
    )
    return _problem("groups then change", question, (a, "*", b), (a * b, sign, c))


def _shopping(r: random.Random) -> Problem:
    name, good, other = r.choice(NAMES), *r.sample(GOODS, 2)
    a, b, c, d = (r.randint(2, 12) for _ in range(4))
    question = (
        f"{name} buys {a} {good}s at {b} dollars each and {c} {other}s at {d} dollars each. "
        f"How many dollars does {name} pay?"
    )
    return _problem("shopping", question, (a, "*", b), (c, "*", d), (a * b, "+", c * d))


def _change_from_a_bill(r: random.Random) -> Problem:
    name, good, other = r.choice(NAMES), *r.sample(GOODS, 2)
    bill = r.choice([50, 100, 200])
    while True:
        a, b, c = r.randint(2, 12), r.randint(2, 15), r.randint(2, 40)
        if a * b + c < bill:
            break
    question = (
        f"{name} buys {a} {good}s at {b} dollars each and one {other} for {c} dollars, "
        f"and pays with {bill} dollars. How many dollars does {name} get back?"
    )
    steps = (a, "*", b), (a * b, "+", c), (bill, "-", a * b + c)
    return _problem("change from a bill", question, *steps)


def _times_as_many(r: random.Random) -> Problem:
    name, other = r.sample(NAMES, 2)
    thing, a, k = r.choice(THINGS), r.randint(2, 40), r.randint(2, 6)
    question = (
        f"{name} has {a} {thing}. {other} has {k} times as many. "
        f"How many {thing} do they have together?"
    )
    return _problem("times as many", question, (a, "*", k), (a, "+", a * k))


def _three_friends(r: random.Random) -> Problem:
    first, second, third = r.sample(NAMES, 3)
    thing, a, b = r.choice(THINGS), r.randint(5, 80), r.randint(2, 40)
    c = r.randint(1, a + b - 1)
    question = (
        f"{first} has {a} {thing}. {second} has {b} more than {first}. "
        f"{third} has {c} fewer than {second}. How many {thing} do the three have together?"
    )
    more, fewer = a + b, a + b - c
    steps = (a, "+", b), (more, "-", c), (a, "+", more), (a + more, "+", fewer)
    return _problem("three friends", question, *steps)


def _shared(r: random.Random) -> Problem:
    name, thing, holder = r.choice(NAMES), r.choice(THINGS), r.choice(HOLDERS)
    while True:
        a, b, c, d = (r.randint(2, 12) for _ in range(4))
        total = a * b + c
        if total % d == 0:
            break
    question = (
        f"{name} has {a} {holder} with {b} {thing} each and {c} more {thing}. "
        f"{name} shares them equally among {d} friends. How many {thing} does each friend get?"
    )
    return _problem("shared", question, (a, "*", b), (a * b, "+", c), (total, "/", d))


KINDS: tuple[Callable[[random.Random], Problem], ...] = (
    _gain,
    _loss,
    _groups,
    _groups_then_change,
    _shopping,
    _change_from_a_bill,
    _times_as_many,
    _three_friends,
    _shared,
)
