"""Arithmetic word problems in English without end, graded from one step to four.

Everything is a function of (split, seed). A problem whose question hashes into the held-out class
is never used for training and every held-out problem is in it, so the two splits share no problem.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Literal

from training.problems.instructions import instruction
from training.problems.more_steps import (
    change_from_a_bill,
    shared,
    shopping,
    three_friends,
    times_as_many,
)
from training.problems.one_step import gain, groups, groups_then_change, loss, plain
from training.problems.problem import Problem

Split = Literal["train", "held-out"]

KINDS: tuple[Callable[[random.Random], Problem], ...] = (
    *(gain, loss, groups, groups_then_change, shopping, change_from_a_bill),
    *(times_as_many, three_friends, shared, plain),
)


def problems(split: Split, seed: int) -> Iterator[Problem]:
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
