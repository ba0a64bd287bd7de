"""Checks the numbers that commands of training are given, and says which settings a run keeps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from srm.engine.settings import flatten
from srm.training.text.tokenizer import MAX_VOCAB_SIZE

MOST_SEED = 2**64 - 1
"""Largest seed that torch takes."""
MOST_FLOAT = 1e18
"""Largest number; the product of two of them still fits float32, in which the optimizer
computes."""
_MOST = {"threads": 4_096, "max_vocab_size": MAX_VOCAB_SIZE}
_MAY_CHANGE = {
    *("steps", "epochs", "learning_rate", "warmup_steps", "warmup_share", "decline"),
    *("save_every", "evaluate_every", "tensorboard", "output"),
    *("threads", "device", "shard", "compile", "precision", "micro_batches", "micro_batch_tokens"),
    *("gpu_memory", "model", "train", "evaluation", "texts", "suffix", "tokenizer"),
}
MAY_CHANGE = (
    "only steps or epochs, learning_rate, its warm-up and decline, save_every, evaluate_every, "
    "tensorboard, precision, micro-batches and what it runs on may change"
)
"""`_MAY_CHANGE` in words for error messages, without files, which are compared by content."""
_LEAST = {"save_every": 1} | dict.fromkeys(
    "learning_rate weight_decay evaluate_every threads".split(), 0
)


def check_numbers(config: msgspec.Struct, least: Mapping[str, float]) -> None:
    """Raise ValueError for a number that is not finite or below its least, and for a `seed` or a
    `clip_norm` that is out of range.

    `least` gives lower bounds by name, besides those that all commands share.
    """
    bounds = {**_LEAST, **least}
    for name in config.__struct_fields__:
        value = getattr(config, name)
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name} must be a finite number, got {value}")
        if isinstance(value, float) and abs(value) > MOST_FLOAT:
            raise ValueError(f"{name} must be at most {MOST_FLOAT:g}, got {value}")
        if name in bounds and value < bounds[name]:
            raise ValueError(f"{name} must be at least {bounds[name]}, got {value}")
        if name in _MOST and value > _MOST[name]:
            raise ValueError(f"{name} must be at most {_MOST[name]}, got {value}")
        if name == "seed" and not 0 <= value <= MOST_SEED:
            raise ValueError(f"seed must be 0 … 2**64 - 1, got {value}")
        if name == "clip_norm" and value <= 0:
            raise ValueError(f"clip_norm must be above 0, got {value}")


def select_fixed(config: msgspec.Struct) -> dict[str, Any]:
    """Return the settings that may not change when a run is resumed."""
    fixed: dict[str, Any] = msgspec.to_builtins(flatten(config), enc_hook=str)
    return {name: value for name, value in fixed.items() if name not in _MAY_CHANGE}
