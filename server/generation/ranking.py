"""`best_of`: which of a prompt's samples become its choices.

Ranked is by the mean log-probability of a sample's tokens, the token that ended it included; of
equal ones the earlier sample goes first. Knows no text and no engine.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace

from server.text.sample import Delta


class Ranking:
    """Collects the samples of each prompt until all are there."""

    def __init__(self, n: int, best_of: int) -> None:
        """Of `best_of` samples, the best `n` are wanted."""
        self._n = n
        self._best_of = best_of
        self._by_prompt: defaultdict[int, list[Delta]] = defaultdict(list)

    def choices(self, sample: Delta) -> list[Delta]:
        """What this finished sample decides: nothing, or its prompt's choices, the best first.

        A sample's index is prompt x best_of + sample; a choice's is prompt x n + place.
        """
        prompt = sample.index // self._best_of
        rivals = self._by_prompt[prompt]
        rivals.append(sample)
        if len(rivals) < self._best_of:
            return []
        del self._by_prompt[prompt]
        rivals.sort(key=lambda one: (-mean_logprob(one), one.index))
        return [
            replace(one, index=prompt * self._n + place)
            for place, one in enumerate(rivals[: self._n])
        ]


def mean_logprob(sample: Delta) -> float:
    """Of its tokens; 0 where there are none."""
    logprobs = memoryview(sample.logprobs).cast("f")
    return math.fsum(logprobs) / len(logprobs) if len(logprobs) else 0.0
