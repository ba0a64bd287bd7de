"""The best samples by mean log-probability, in the order and under the indices of choices."""

from __future__ import annotations

import math
from array import array
from itertools import permutations

from server.generation.sample_selection import Ranking, mean_logprob
from server.text.sample import Delta


def sample(index: int, logprobs: list[float]) -> Delta:
    token_ids = array("i", range(len(logprobs))).tobytes()
    found = array("f", logprobs).tobytes()
    return Delta(index, True, str(index), token_ids, found, b"", b"", [], "length", None)


SCORES = [[-1.0], [-0.5, -0.75], [-4.0, 0.0, 0.0, 0.0], [-math.inf, 0.0]]
"""Means: -1, -0.625, -1, minus infinity."""


def test_choices_come_best_first_in_whatever_order_samples_end() -> None:
    for order in permutations(range(4)):
        ranking = Ranking(n=3, best_of=4)
        found = [ranking.choices(sample(4 + i, SCORES[i])) for i in order]  # of prompt 1
        assert found[:3] == [[], [], []]
        assert [(one.index, one.text) for one in found[3]] == [(3, "5"), (4, "4"), (5, "6")]


def test_prompts_are_ranked_apart() -> None:
    ranking = Ranking(n=1, best_of=2)
    assert ranking.choices(sample(0, [-1])) == []
    assert ranking.choices(sample(2, [-9])) == []
    assert [one.text for one in ranking.choices(sample(3, [-8]))] == ["3"]
    assert [one.text for one in ranking.choices(sample(1, [-7]))] == ["0"]


def test_the_mean_is_per_token() -> None:
    assert mean_logprob(sample(0, [-1, -2, -3])) == -2
    assert mean_logprob(sample(0, [])) == 0
