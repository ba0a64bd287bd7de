"""Learning rates and initial scales that are tried: what diverges loses, and ends nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, TypeVar

from research.experiments.harness.result_cache import Numbers
from srm.errors import ConfigError
from srm.training.loop import Diverged

WORST = 1e9
"""The loss of training that diverged; JSON has no infinity."""


Tried = TypeVar("Tried", float, "Start")


class Start(NamedTuple):
    """How training of a model begins."""

    rate: float
    """Learning rate."""
    scale: float = 1.0
    """Factor of all initial matrices."""

    def __str__(self) -> str:
        return f"{self.rate:g} x{self.scale:g}"


def neighbours(start: Start) -> list[Start]:
    """Return those beside it on the grid of powers of two."""
    rate, scale = start
    rates = Start(rate / 2, scale), Start(rate * 2, scale)
    return [*rates, Start(rate, scale / 2), Start(rate, scale * 2)]


def search(
    starts: Iterable[Start], measure: Callable[[Start], Numbers], most: int
) -> dict[Start, Numbers]:
    """Measure these starts, and those beside the best one until none of them is better, or `most`
    were tried."""
    tried = {start: measure(start) for start in starts}
    while len(tried) < most:
        missing = [start for start in neighbours(best_rate(tried)) if start not in tried]
        if not missing:
            break
        tried |= {start: measure(start) for start in missing[: most - len(tried)]}
    return tried


def or_worst(measure: Callable[[int], Numbers]) -> Callable[[int], Numbers]:
    """Return a function that measures as `measure`; `loss` is WORST where training diverges."""

    def measured(seed: int) -> Numbers:
        try:
            result = measure(seed)
        except Diverged:
            return {"loss": WORST}
        return result if math.isfinite(result["loss"]) else result | {"loss": WORST}

    return measured


def best_rate(tried: Mapping[Tried, Numbers]) -> Tried:
    """Return the learning rate, or start, with the least loss. Raises ConfigError if training
    diverged with each."""
    best = min(tried, key=lambda rate: tried[rate]["loss"])
    if tried[best]["loss"] == WORST:
        names = ", ".join(map(str, tried))
        raise ConfigError(f"learning_rates: training diverged with each of {names}")
    return best


def losses_of(tried: Mapping[Tried, Numbers]) -> str:
    """Show the loss of each learning rate, or start."""
    return ", ".join(
        f"{rate}: {'diverged' if of['loss'] == WORST else format(of['loss'], '.3f')}"
        for rate, of in tried.items()
    )
