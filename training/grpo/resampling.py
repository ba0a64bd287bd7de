"""Which rollouts are learned from, and how much better each is than the others of its group.

Balanced resampling: of many rollouts of a question, few are kept, and up to half of these are good,
however rare good ones are. Knows no tokens and no model.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

GOOD = 1.0
"""A rollout is good whose reward is at least this."""
_STEADY = 1e-4
"""Added to the standard deviation of rewards, which is 0 where all are equal."""


class Resampling(msgspec.Struct, frozen=True):
    """How rollouts are chosen. Published code has both `pool` and `in_order`."""

    group_size: int
    """Rollouts that are kept of each question, or of all with `pool`; 0: all of each question."""
    pool: bool = False
    """Whether all questions' rollouts are one group."""
    in_order: bool = False
    """Whether the first ones are kept, and not ones drawn at random."""


def chosen(rewards: Floats, rules: Resampling, random: np.random.Generator) -> list[Ints]:
    """Return the groups to learn from, as indices into the flat f64[questions, rollouts].

    No rollout is in a group twice. Needs as many rollouts as a group has.
    """
    flat = rewards.ravel()
    groups = np.arange(flat.size).reshape(1 if rules.pool else len(rewards), -1)
    if not rules.group_size:
        return list(groups)
    return [
        group[_balanced(flat[group] >= GOOD, rules.group_size, None if rules.in_order else random)]
        for group in groups
    ]


def _balanced(is_good: NDArray[np.bool_], size: int, random: np.random.Generator | None) -> Ints:
    """Choose `size`: up to half good ones, then bad ones; more good ones where bad ones run out."""
    good, bad = np.flatnonzero(is_good), np.flatnonzero(~is_good)
    if random is not None:
        good, bad = random.permutation(good), random.permutation(bad)
    half = size // 2
    return np.concatenate([good[:half], bad[: size - len(good[:half])], good[half:]])[:size]


def advantages(rewards: Floats) -> Floats:
    """Return (r - mean) / (standard deviation + 1e-4) of a group of two or more, without bias; 0
    where all rewards are equal."""
    away = rewards - rewards.mean()
    if np.ptp(rewards) == 0:
        return np.zeros_like(away)
    found: Floats = away / (rewards.std(ddof=1) + _STEADY)
    return found
