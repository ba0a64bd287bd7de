"""Coverage: the probability that at least one of k samples is right (pass@k), mean over problems.

Of n samples of a problem, c of them right, pass@k is estimated without bias by
1 - C(n - c, k) / C(n, k) (Chen et al. 2021, https://arxiv.org/abs/2107.03374).

Where samples were drawn one after the other until m were right, N is random, and the last one is
always right. The N - 1 before it are m - 1 right ones in any order, so that the unbiased estimate
is 1 - C(N - 1 - k, m - 1) / C(N - 1, m - 1) for k < N, and 1 for k >= N. Problems of which n
samples had fewer than m right ones have the first estimate; both together are unbiased for k <= n.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

CONFIDENCE = 0.95
"""Confidence level of all intervals."""


class Tally(NamedTuple):
    """The samples of one problem."""

    drawn: int
    right: int
    is_until: bool = False
    """Whether drawing stopped as soon as `right` samples were right; then the last sample is
    right."""


class Interval(NamedTuple):
    """Ends of an interval that contains the true value with a probability of about `CONFIDENCE`."""

    low: float
    high: float


def pass_table(counts: Sequence[Tally], ks: Sequence[int]) -> Floats:
    """Return each problem's estimate of pass@k, of shape [problems, ks].

    Raises ValueError for a k that a problem has too few samples for, and for an impossible tally.
    """
    drawn, right, is_until = (np.array(column) for column in zip(*counts, strict=True))
    if (right < 0).any() or (right > drawn).any() or (is_until & (right < 1)).any():
        raise ValueError("needs 0 ≤ right ≤ drawn, and right ≥ 1 where it ended the drawing")
    if min(ks) < 1 or max(ks) > min(drawn[~is_until], default=max(ks)):
        raise ValueError(f"k must be 1 … the samples of every problem, got {min(ks)} … {max(ks)}")
    # the same for both kinds: n places, g of them wrong, and k drawn of the n
    n, wrong = drawn - is_until, drawn - right
    return _estimates(n, wrong, np.array(ks))


def _estimates(n: Ints, wrong: Ints, ks: Ints) -> Floats:
    """Return 1 - C(wrong, k) / C(n, k), and 1 where k > wrong; of shape [problems, ks].

    C(n - k, r) / C(n, r) with r = n - wrong is the same ratio: both kinds of drawing have this one.
    """
    logs = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, max(n.max(), 1) + 1)))])
    n, wrong, k = n[:, None], wrong[:, None], ks[None, :]
    possible = k <= wrong  # to draw wrong ones only
    k = np.where(possible, k, 0)
    # each difference is exactly 0 where all are wrong, so that their estimate is 0 too
    log_ratio = (logs[wrong] - logs[n]) - (logs[wrong - k] - logs[n - k])
    return np.where(possible, -np.expm1(np.minimum(log_ratio, 0.0)), 1.0)


def standard_errors(table: Floats) -> Floats:
    """Return the standard error of each column's mean over problems; 0 for a single problem."""
    if len(table) == 1:
        return np.zeros(table.shape[1])
    errors: Floats = table.std(axis=0, ddof=1) / np.sqrt(len(table))
    return errors


def spaced(largest: int) -> list[int]:
    """Return k from 1 to `largest`, ten of them in each power of ten, evenly on a log scale."""
    powers = range(math.floor(10 * math.log10(largest)) + 1)
    return sorted({round(10 ** (power / 10)) for power in powers} | {largest})


def resampled_means(table: Floats, times: int, seed: int) -> Floats:
    """Return the means over problems that are drawn again from those of `table`, with replacement,
    and so are seeds if it has any.

    `table` is [problems, ks] or [seeds, problems, ks], the result [times, ks]. Its spread is that
    of other problems of the same kind, sampled anew: the estimates differ between problems for both
    reasons. Over seeds it is also that of other models, trained anew.
    """
    random = np.random.default_rng(seed)
    of_seeds = table if table.ndim == 3 else table[None]

    def shares(count: int) -> Floats:
        return random.multinomial(count, np.full(count, 1 / count), times) / count

    problems = shares(of_seeds.shape[1])
    seeds = shares(len(of_seeds))
    means: Floats = np.einsum("ts,tsk->tk", seeds, np.einsum("tp,spk->tsk", problems, of_seeds))
    return means


def redrawn_means(counts: Sequence[Tally], ks: Sequence[int], times: int, seed: int) -> Floats:
    """Return means over the same problems as more samples of them might show, [times, ks].

    A problem's rate is drawn from Beta(right + 1/2, wrong + 1/2), what its samples say of it by
    Jeffreys' prior; so one without a right sample has a small rate, and not 0. That prior's shift
    of the mean is taken off: the draws lie about the estimate. At k near the number of samples,
    intervals of rare rates still hold the true value less often than they say (0.75 to 0.9 of the
    times in simulations, 0.96 at a tenth of the samples).
    """
    random, means = np.random.default_rng(seed), np.empty((times, len(ks)))
    drawn, right, _ = (np.array(column) for column in zip(*counts, strict=True))
    for turn in range(times):
        rates = random.beta(right + 0.5, drawn - right + 0.5)
        means[turn] = -np.expm1(np.outer(np.log1p(-rates), ks)).mean(axis=0)
    means += pass_table(counts, ks).mean(axis=0) - means.mean(axis=0)
    return means.clip(0, 1)


def intervals(means: Floats) -> list[Interval]:
    """Return the middle `CONFIDENCE` of each column of resampled values."""
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(means, [tail, 1 - tail], axis=0)
    return [Interval(float(a), float(b)) for a, b in zip(low, high, strict=True)]
