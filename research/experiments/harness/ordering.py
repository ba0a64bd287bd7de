"""Counts the pairs of cases whose figures stand in the order of the paper's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import mean, stdev


@dataclass(frozen=True)
class Ordering:
    """Number of pairs of cases that differ in the paper, and how many of them stand in its order in
    ours."""

    pairs: int
    in_order: int
    clear: int
    """Pairs whose means differ by more than twice the standard error of the difference, in ours."""
    clear_in_order: int

    def sentence(self) -> str:
        """Return the counts as a sentence."""
        return (
            f"{self.in_order} of {self.pairs} pairs of cases stand in the paper's order; of the "
            f"{self.clear} whose means differ by more than twice their standard error, "
            f"{self.clear_in_order} do."
        )


def ordering(ours: Mapping[str, Sequence[float]], paper: Mapping[str, float]) -> Ordering:
    """Compare all pairs of cases that both have; `ours` has a figure for each seed, two or more."""
    pairs = in_order = clear = clear_in_order = 0
    for first, other in combinations([name for name in ours if name in paper], 2):
        if paper[first] == paper[other]:
            continue
        gap = mean(ours[first]) - mean(ours[other])
        agrees = gap * (paper[first] - paper[other]) > 0
        is_clear = abs(gap) > 2 * math.hypot(
            standard_error(ours[first]), standard_error(ours[other])
        )
        pairs += 1
        in_order += agrees
        clear += is_clear
        clear_in_order += is_clear and agrees
    return Ordering(pairs, in_order, clear, clear_in_order)


def standard_error(figures: Sequence[float]) -> float:
    """Return the standard error of the figures' mean."""
    return stdev(figures) / math.sqrt(len(figures))
