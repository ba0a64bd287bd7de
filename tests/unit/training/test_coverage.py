"""pass@k: unbiased for both ways of drawing, its intervals, and its power law."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest

from srm.training.statistics.coverage import (
    Tally,
    intervals,
    pass_table,
    redrawn_means,
    resampled_means,
    spaced,
)
from srm.training.statistics.power_law import PowerLaw, fit, fits


def test_the_table_is_of_the_exact_numbers() -> None:
    ks = spaced(10_000)
    assert (ks[0], ks[-1], len(ks)) == (1, 10_000, len(set(ks)))
    counts = [Tally(10_000, right) for right in (0, 1, 7, 4_321, 9_999, 10_000)]
    expected = [
        [1 - math.comb(count.drawn - count.right, k) / math.comb(count.drawn, k) for k in ks]
        for count in counts
    ]
    np.testing.assert_allclose(pass_table(counts, ks), expected, atol=1e-9, rtol=0)


@pytest.mark.parametrize("enough", [1, 2, 3])
@pytest.mark.parametrize("rate", [0.2, 0.7])
def test_estimates_are_unbiased_when_drawing_ends_early(enough: int, rate: float) -> None:
    """Summed over all that six draws can be: the formulas of docs/many-samples.md, both of them."""
    samples, ks = 6, [1, 2, 3, 6]
    counts, chances = [], []
    for draws in product([False, True], repeat=samples):
        chances.append(np.prod([rate if draw else 1 - rate for draw in draws]))
        places = [place for place, is_right in enumerate(draws, 1) if is_right]
        is_until = len(places) >= enough
        drawn = places[enough - 1] if is_until else samples
        counts.append(Tally(drawn, min(len(places), enough), is_until))
    result = np.array(chances) @ pass_table(counts, ks)
    np.testing.assert_allclose(result, [1 - (1 - rate) ** k for k in ks], atol=1e-12)


def test_impossible_tallies_are_refused() -> None:
    impossible = [Tally(5, 6), Tally(5, -1), Tally(5, 0, is_until=True)]
    for tally, k in (*((tally, 1) for tally in impossible), (Tally(5, 1), 6), (Tally(5, 1), 0)):
        with pytest.raises(ValueError, match=r"needs|k must be"):
            pass_table([tally, Tally(9, 1)], [k])


def test_intervals_have_the_spread_that_they_claim() -> None:
    """Of pass@1 over many problems both spreads are known."""
    random = np.random.default_rng(1)
    rates, samples = random.beta(2, 3, 400), 50
    counts = [Tally(samples, int(item)) for item in random.binomial(samples, rates)]
    table = pass_table(counts, [1])
    (low, high), *_ = intervals(resampled_means(table, 4_000, 0))
    assert high - low == pytest.approx(2 * 1.96 * table.std() / 400**0.5, rel=0.05)
    assert low < table.mean() < high
    result = table[:, 0]
    own = (result * (1 - result) / samples).mean() ** 0.5 / 400**0.5
    (low, high), *_ = intervals(redrawn_means(counts, [1], 2_000, 0))
    assert high - low == pytest.approx(2 * 1.96 * own, rel=0.08)
    same = redrawn_means(counts, [1], 20, 0)
    np.testing.assert_array_equal(same, redrawn_means(counts, [1], 20, 0))
    assert (same != redrawn_means(counts, [1], 20, 1)).any()


@pytest.mark.parametrize("samples", [100, 1_000])
@pytest.mark.parametrize("shape", [(0.1, 1), (0.3, 50), (5, 0.5), (1, 1), (0.01, 0.01)], ids=repr)
def test_intervals_hold_their_estimate(shape: tuple[float, float], samples: int) -> None:
    """Also where k is as large as the samples, and most problems have no right one or no other."""
    random, ks = np.random.default_rng(1), spaced(samples)
    right = random.binomial(samples, random.beta(*shape, 200))
    counts = [Tally(samples, int(count)) for count in right]
    redrawn = intervals(redrawn_means(counts, ks, 200, 0))
    for estimate, (low, high) in zip(pass_table(counts, ks).mean(axis=0), redrawn, strict=True):
        assert 0 <= low <= estimate <= high <= 1
        assert low < high or estimate == 1


def test_an_interval_is_that_of_how_samples_were_drawn() -> None:
    """Until ten are right: about the estimate, with the spread of the negative binomial."""
    counts = [Tally(40, 10, is_until=True), Tally(1_000, 0)]
    means = redrawn_means(counts, [1], 2_000, 0)[:, 0]
    assert means.mean() == pytest.approx(9 / 39 / 2, rel=0.02)
    relative = means.std() / means.mean()
    assert relative == pytest.approx((0.75 / 8) ** 0.5, rel=0.1)  # of (m - 1) / (N - 1)


def test_a_power_law_is_found_again() -> None:
    ks = spaced(10_000)
    for law in (PowerLaw(-2.0, -0.3), PowerLaw(-0.6, -0.9), PowerLaw(-5.0, -0.1)):
        result = fit(ks, law.coverage(ks))
        assert result == pytest.approx(law, rel=1e-6)
        assert fit(ks, law.coverage(ks), PowerLaw(-1.0, -0.5)) == pytest.approx(law, rel=1e-6)


def test_the_fit_is_that_of_the_least_squared_error() -> None:
    ks = spaced(1_000)
    bent = 1 - 0.9 / (1 + 0.2 * np.array(ks)) - 0.05
    law = fit(ks, bent)
    assert law is not None

    def error(one: PowerLaw) -> float:
        return float(np.square(one.coverage(ks) - bent).sum())

    for a, b in product([-1e-4, 0.0, 1e-4], repeat=2):
        assert error(law) <= error(PowerLaw(law.a + a, law.b + b)) + 1e-15


def test_where_there_is_no_law_none_is_claimed() -> None:
    ks = spaced(100)
    for level in (0.0, 0.4, 1.0):
        assert fit(ks, np.full(len(ks), level)) is None
    assert fit([1, 2], np.array([0.1, 0.2])) is None
    law = PowerLaw(-2.0, -0.3)
    (only,) = fits(ks, np.array([np.ones(len(ks)), law.coverage(ks)]), law)
    assert only == pytest.approx(law, rel=1e-6)


def test_no_law_is_fitted_to_nothing_and_to_a_step() -> None:
    """Rounding once made a curve of no right sample. A step is of a problem that is drawn until it
    is right."""
    ks = spaced(1_000)
    for tally in (Tally(1_000, 0), Tally(900, 1, is_until=True)):
        table = pass_table([tally], ks)
        assert table.any() == tally.is_until and fit(ks, table.mean(axis=0)) is None
