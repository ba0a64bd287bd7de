"""What `srm bench until` makes of its replies."""

from __future__ import annotations

from itertools import combinations
from statistics import mean

import pytest

from bench.model.until import UntilBenchConfig, pass_at_k_until
from training.evaluate import pass_at_k


def estimate(is_right: tuple[bool, ...], enough: int, k: int) -> float:
    """From the samples up to the one that is enough, as a reply with `until` has them."""
    ends = [end for end, right in enumerate(is_right, 1) if right]
    if len(ends) < enough:
        return pass_at_k_until(len(is_right), len(ends), False, k)
    return pass_at_k_until(ends[enough - 1], enough, True, k)


@pytest.mark.parametrize("enough", [1, 2, 3])
@pytest.mark.parametrize("right", range(6))
def test_over_all_orders_it_is_what_all_samples_say(right: int, enough: int) -> None:
    orders = [
        tuple(place in found for place in range(6)) for found in combinations(range(6), right)
    ]
    for k in range(1, 7):
        found = mean(estimate(order, enough, k) for order in orders)
        assert found == pytest.approx(pass_at_k(6, right, k), abs=1e-12)


@pytest.mark.parametrize(("drawn", "right", "k"), [(3, 0, 1), (2, 3, 1), (3, 1, 0)])
def test_what_cannot_be_is_refused(drawn: int, right: int, k: int) -> None:
    with pytest.raises(ValueError, match="needs 1"):
        pass_at_k_until(drawn, right, True, k)


def test_more_right_ones_than_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="counts"):
        UntilBenchConfig(counts=(1, 1_001))
