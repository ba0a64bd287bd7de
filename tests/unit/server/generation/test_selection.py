"""Which finished samples become choices: the likeliest, or one of each text while there is room."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from itertools import permutations

import pytest

from srm.engine.messages import Output
from srm.errors import InvalidRequest
from srm.server.generation.dedup_counts import Budget, DedupCounts
from srm.server.generation.detokenize import ChoicePart
from srm.server.generation.sample_selection import Ranking


def sample(
    index: int, text: str, num_tokens: int = 1, logprobs: Sequence[float] = ()
) -> ChoicePart:
    tokens = Output("", index, bytes(4 * num_tokens), array("f", logprobs).tobytes())
    return ChoicePart(index, True, text, tokens, [], "stop", None)


SCORES = [[-1.0], [-0.5, -0.75], [-4.0, 0.0, 0.0, 0.0], [-math.inf, 0.0], []]
"""Means: -1, -0.625, -1, minus infinity, 0."""


def test_the_best_by_mean_logprob_come_in_whatever_order_samples_end() -> None:
    for order in permutations(range(5)):
        ranking = Ranking(n=4, best_of=5)
        assert not ranking.choices(sample(4, "of another prompt"))
        *early, result = (ranking.choices(sample(5 + i, f"{i}", 1, SCORES[i])) for i in order)
        assert early == [[]] * 4
        assert [(item.index, item.text) for item in result] == [
            (4, "4"),
            (5, "1"),
            (6, "0"),
            (7, "2"),
        ]


@pytest.mark.parametrize("keeps_first", [False, True])
def test_equal_samples_take_nothing_and_distinct_ones_are_limited(keeps_first: bool) -> None:
    budget = Budget(10_000)
    counts = [DedupCounts("text", keeps_first, budget) for _ in range(2)]
    for index in reversed(range(1_000)):
        counts[index % 2].add(sample(index, "same"))
    assert [dedup_counts.by_count()[0].count for dedup_counts in counts] == [500, 500]
    with pytest.raises(InvalidRequest, match="more than 10000 bytes") as refused:
        for index in range(20):
            counts[0].add(sample(index, f"other {index}"))
    assert refused.value.param == "return"


def test_a_kept_sample_counts_with_all_that_is_in_it() -> None:
    dedup_counts = DedupCounts("text", keeps_first=True, budget=Budget(3_000))
    dedup_counts.add(sample(7, "same", num_tokens=500))
    dedup_counts.add(sample(5, "same", num_tokens=400))  # in its place
    (first,) = dedup_counts.firsts()
    assert (first.index, first.count) == (5, 2)
    with pytest.raises(InvalidRequest, match="more than 3000 bytes"):
        dedup_counts.add(sample(8, "other", num_tokens=400))
