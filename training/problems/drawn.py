"""Arithmetic word problems in English without end, graded from one step to four.

Everything is a function of (split, seed). A problem whose question hashes into the held-out class
is never used for training and every held-out problem is in it, so the two splits share no problem.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Literal

from srm.training.problems.more_steps import (
    change_from_a_bill,
    shared,
    shopping,
    three_friends,
    times_as_many,
)
from srm.training.problems.one_step import gain, groups, groups_then_change, loss, plain
from srm.training.problems.problem import Problem, Style

Split = Literal["train", "held-out"]

KINDS: tuple[Callable[[random.Random], Problem], ...] = (
    *(gain, loss, groups, groups_then_change, shopping, change_from_a_bill),
    *(times_as_many, three_friends, shared, plain),
)
_POLITE = ("", "", "", "", "You are a helpful assistant. ", "You solve word problems. ")
_ASKS: dict[Style, tuple[str, ...]] = {
    "prose": (
        *("Explain in words.", "Explain your answer in words.", "Explain each step in words."),
        *("Answer in words.", "Answer in whole sentences.", "Answer in prose.", "Explain."),
        *("Explain how you get there.", "Write whole sentences.", "Explain your reasoning."),
        *("Please explain the answer.", "Use sentences.", "Think step by step, in words."),
    ),
    "number": (
        *("Only the number.", "Answer with the number only.", "Give only the number."),
        *("Just the number.", "Say only the result.", "No explanation.", "Only the result."),
        *("Answer with a number and nothing else.", "Give just the answer.", "Only the answer."),
        *("Do not explain.", "Reply with only the final number."),
    ),
    "equations": (
        *("You are a helpful assistant.", "You are a helpful assistant.", "Be kind."),
        *("Answer the question.", "Solve the problem.", "You are good at arithmetic."),
        *("Show the equations.", "Write equations.", "Answer with equations."),
        *("Be brief.", "Show the steps.", "Calculate step by step."),
    ),
}
_SHARES: dict[Style, float] = {"prose": 0.27, "number": 0.1, "equations": 0.13}
"""How often a system message asks for each style. The rest has none, and equations."""


def problems(split: Split, seed: int | str) -> Iterator[Problem]:
    """Yield problems without end, distinct by chance; the same for the same split and seed."""
    random_ = random.Random(f"{split}-{seed}")
    while True:
        problem = random_.choice(KINDS)(random_)
        if problem.is_held_out == (split == "held-out"):
            yield problem


def examples(seed: int) -> Iterator[tuple[str, str]]:
    """Yield prompts and solutions to train on: problems, some with a system message that says in
    which style they are answered."""
    random_ = random.Random(f"styles-{seed}")
    for problem in problems("train", seed):
        system, style = instruction(random_)
        yield problem.prompt_with(system), problem.solution_in(style)


def instruction(r: random.Random) -> tuple[str, Style]:
    """Draw a system message, or "", and the style of the answer to it."""
    place = r.random()
    for style, share in _SHARES.items():
        if place < share:
            polite = "" if style == "equations" else r.choice(_POLITE)
            return polite + r.choice(_ASKS[style]), style
        place -= share
    return "", "equations"
