"""Checks the numbers that commands of training are given."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

MOST_SEED = 2**64 - 1
"""torch takes no larger seed."""
_LEAST = {"save_every": 1} | dict.fromkeys(
    "learning_rate weight_decay evaluate_every threads".split(), 0
)


def check_numbers(config: msgspec.Struct, least: Mapping[str, float]) -> None:
    """Raise ValueError for a number that is not finite or below its least, and for a `seed` or a
    `clip_norm` that is out of range.

    `least` is by name, and adds to what all commands have.
    """
    bounds = {**_LEAST, **least}
    for name in config.__struct_fields__:
        value = getattr(config, name)
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name} must be a finite number, got {value}")
        if name in bounds and value < bounds[name]:
            raise ValueError(f"{name} must be at least {bounds[name]}, got {value}")
        if name == "seed" and not 0 <= value <= MOST_SEED:
            raise ValueError(f"seed must be 0 … 2**64 - 1, got {value}")
        if name == "clip_norm" and value <= 0:
            raise ValueError(f"clip_norm must be above 0, got {value}")
