"""How far a model's logits are from those of an oracle, position by position.

KL is the Kullback-Leibler divergence of the sampled distribution at temperature 1 from the
oracle's, in nats. Positions are counted from 1. Knows no models.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

Summary = dict[str, float | list[int]]


class Oracle:
    """Exact logits f64[T, B, V] of T positions of B sequences."""

    def __init__(self, logits: Tensor) -> None:
        self._logits = logits
        self._logprobs = logits.log_softmax(-1)
        self._probabilities = self._logprobs.exp()
        self._best = logits.argmax(-1)
        self.largest_logit = float(logits.abs().max())

    def compare(self, logits: Tensor) -> Divergence:
        """Logits f32[T, B, V] of the same tokens, with the oracle's."""
        found = logits.double()
        error = (found - self._logits) / self.largest_logit
        terms = self._probabilities * (self._logprobs - found.log_softmax(-1))
        return Divergence(
            largest=error.abs().amax(-1),
            square=error.square().mean(-1),
            agrees=found.argmax(-1) == self._best,
            # It is never negative, but the rounding of its sum may be.
            kl=terms.sum(-1).clamp(min=0),
        )


@dataclass(frozen=True)
class Divergence:
    """What differs, per position and sequence. Errors are in units of the largest exact logit."""

    largest: Tensor  # f64[T, B] largest |error| over the vocabulary
    square: Tensor  # f64[T, B] mean square error over the vocabulary
    agrees: Tensor  # bool[T, B] whether the likeliest token is the same
    kl: Tensor  # f64[T, B]

    def summary(self, first: int = 1, last: int | None = None) -> Summary:
        """Over positions first … last and all sequences."""
        last = len(self.kl) if last is None else last
        here = slice(first - 1, last)
        kl = self.kl[here].flatten()
        return {
            "positions": [first, last],
            "max_error": float(self.largest[here].max()),
            "rms_error": float(self.square[here].mean().sqrt()),
            "greedy_agreement": float(self.agrees[here].double().mean()),
            "kl_mean": float(kl.mean()),
            "kl_p99": float(kl.quantile(0.99)),
        }

    def by_position(self) -> list[Summary]:
        """A summary of each of 1, 2, 3 … 4, 5 … 8, to the last position."""
        return [self.summary(first, last) for first, last in octaves(len(self.kl))]


def octaves(length: int) -> Iterator[tuple[int, int]]:
    """(1, 1), (2, 2), (3, 4), (5, 8) … up to `length`."""
    ends = [0, *(1 << power for power in range((length - 1).bit_length())), length]
    yield from ((before + 1, end) for before, end in pairwise(ends))


def largest_value(model: torch.nn.Module, ids: Tensor) -> tuple[Tensor, float]:
    """A model's logits, and the largest magnitude that any module in it gave."""
    seen = [0.0]

    def look(_module: torch.nn.Module, _inputs: object, output: Tensor) -> None:
        seen.append(float(output.abs().max()))

    hooks = [module.register_forward_hook(look) for module in list(model.modules())[1:]]
    logits: Tensor = model(ids)
    for hook in hooks:
        hook.remove()
    return logits, max(seen)
