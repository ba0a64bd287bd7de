"""Divergence of a model's logits from those of an oracle, position by position.

KL is the Kullback-Leibler divergence of the sampled distribution at temperature 1 from the
oracle's, in nats. Positions are counted from 1. Knows no models.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

Summary = dict[str, float]


class Oracle:
    """Exact logits f64[T, B, V] of T positions of B sequences."""

    def __init__(self, logits: Tensor) -> None:
        self._logits = logits
        self._logprobs = logits.log_softmax(-1)
        self._probabilities = self._logprobs.exp()
        self._best = logits.argmax(-1)
        self.largest_logit = float(logits.abs().max())

    def compare(self, logits: Tensor) -> Divergence:
        """Compare logits f32[T, B, V] of the same tokens with the oracle's."""
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
    """Differences per position and sequence. Errors are in units of the largest exact logit."""

    largest: Tensor  # f64[T, B] largest |error| over the vocabulary
    square: Tensor  # f64[T, B] mean square error over the vocabulary
    agrees: Tensor  # bool[T, B] whether the likeliest token is the same
    kl: Tensor  # f64[T, B]

    def summary(self, first: int = 1, last: int | None = None) -> Summary:
        """Return the measures over positions first … last and all sequences, to four digits."""
        here = slice(first - 1, last)
        kl = self.kl[here].flatten()
        exact = {
            "max_error": self.largest[here].max(),
            "rms_error": self.square[here].mean().sqrt(),
            "greedy_agreement": self.agrees[here].double().mean(),
            "kl_mean": kl.mean(),
            "kl_p99": kl.quantile(0.99),
        }
        return {name: float(f"{float(value):.4g}") for name, value in exact.items()}

    def by_position(self) -> dict[str, list[float]]:
        """Return each measure's values over `octaves`."""
        found = [self.summary(first, last) for first, last in octaves(len(self.kl))]
        return {name: [one[name] for one in found] for name in found[0]}


def octaves(length: int) -> Iterator[tuple[int, int]]:
    """Yield (1, 1), (2, 2), (3, 4), (5, 8) … up to `length`."""
    ends = [0, *(1 << power for power in range((length - 1).bit_length())), length]
    yield from ((before + 1, end) for before, end in pairwise(ends))


def largest_value(model: torch.nn.Module, ids: Tensor) -> tuple[Tensor, float]:
    """Return a model's logits, and the largest magnitude that any module in it returned."""
    seen = [0.0]

    def look(_module: torch.nn.Module, _inputs: object, output: Tensor) -> None:
        seen.append(float(output.abs().max()))

    hooks = [module.register_forward_hook(look) for module in list(model.modules())[1:]]
    logits: Tensor = model(ids)
    for hook in hooks:
        hook.remove()
    return logits, max(seen)
