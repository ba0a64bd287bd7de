"""Chooses the rollouts to learn from, and computes their advantages within each group.

Balanced resampling: of many rollouts of a question, few are kept, and up to half of these are good,
however rare good ones are.
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
"""Added to the standard deviation of rewards, so that it is not 0."""


class Resampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rules for choosing rollouts; a group of settings."""

    group_size: int = 16
    """Rollouts of each question that are learned from, up to half of them good; 0: all."""
    pool: bool = False
    """Whether all questions' rollouts form one group, as in the published code."""
    in_order: bool = False
    """Whether a group takes the first rollouts, as in the published code, instead of random
    ones."""


def chosen(rewards: Floats, rules: Resampling, random: np.random.Generator) -> list[Ints]:
    """Return the groups to learn from, as indices into the flat f64[questions, rollouts].

    No rollout is in a group twice. Needs at least as many rollouts as a group has.
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


def advantages(rewards: Floats, scale: bool = True) -> Floats:
    """Return (r - mean) / (unbiased standard deviation + 1e-4) for a group of two or more; without
    `scale` not divided; 0 where all rewards are equal."""
    away: Floats = rewards - rewards.mean()
    if np.ptp(rewards) == 0:
        return np.zeros_like(away)
    if not scale:
        return away
    scaled: Floats = away / (rewards.std(ddof=1) + _STEADY)
    return scaled
