"""pass@k against counting every subset."""

from __future__ import annotations

from itertools import combinations

import pytest

from training.evaluate import pass_at_k


@pytest.mark.parametrize("samples", [1, 4, 7])
def test_pass_at_k_equals_the_share_of_subsets_with_a_right_sample(samples: int) -> None:
    for right in range(samples + 1):
        for k in range(1, samples + 1):
            subsets = list(combinations([True] * right + [False] * (samples - right), k))
            expected = sum(any(subset) for subset in subsets) / len(subsets)
            assert pass_at_k(samples, right, k) == pytest.approx(expected)


@pytest.mark.parametrize(("samples", "right", "k"), [(4, 5, 1), (4, -1, 1), (4, 1, 5), (4, 1, 0)])
def test_pass_at_k_refuses_what_cannot_be(samples: int, right: int, k: int) -> None:
    with pytest.raises(ValueError, match="needs"):
        pass_at_k(samples, right, k)
