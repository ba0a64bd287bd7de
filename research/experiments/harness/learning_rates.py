"""Learning rates that are tried: what diverges loses, and ends nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from research.experiments.harness.result_cache import Numbers
from srm.errors import ConfigError
from srm.training.loop import Diverged

WORST = 1e9
"""The loss of training that diverged; JSON has no infinity."""


def or_worst(measure: Callable[[int], Numbers]) -> Callable[[int], Numbers]:
    """Return a function that measures as `measure`; `loss` is WORST where training diverges."""

    def measured(seed: int) -> Numbers:
        try:
            result = measure(seed)
        except Diverged:
            return {"loss": WORST}
        return result if math.isfinite(result["loss"]) else result | {"loss": WORST}

    return measured


def best_rate(tried: Mapping[float, Numbers]) -> float:
    """Return the learning rate with the least loss. Raises ConfigError if training diverged with
    each."""
    best = min(tried, key=lambda rate: tried[rate]["loss"])
    if tried[best]["loss"] == WORST:
        names = ", ".join(f"{rate:g}" for rate in tried)
        raise ConfigError(f"learning_rates: training diverged with each of {names}")
    return best


def losses_of(tried: Mapping[float, Numbers]) -> str:
    """Show the loss of each learning rate."""
    return ", ".join(
        f"{rate:g}: {'diverged' if of['loss'] == WORST else format(of['loss'], '.3f')}"
        for rate, of in tried.items()
    )
