"""The models that are compared: variants of SRM, Mamba 2, masked mixer, Transformer."""

from __future__ import annotations

from typing import Any

from engine.config import ModelConfig
from experiments.baselines import HEADS, models
from training.model import SRM, LanguageModel

SRMS: dict[str, dict[str, Any]] = {
    "mixed decay no projections": {"mixer": "mixed", "decay": True, "use_projections": False},
    "mixed decay": {"mixer": "mixed", "decay": True},
    "mixed no projections": {"mixer": "mixed", "use_projections": False},
    "mixed": {"mixer": "mixed"},
    "plain heads": {"mixer": "column_heads"},
    "parallel heads": {"mixer": "parallel", "decay": True},
    "headless": {"mixer": "column"},
    "kernel 4": {"mixer": "kernel", "kernel_size": 4},
    "kernel 8": {"mixer": "kernel", "kernel_size": 8},
}
"""Settings of ModelConfig; without decay where it is not named, and projected with heads."""
MULTIPLE = 2 * HEADS
"""Widths of all models are multiples of it."""


def made(variant: str, width: int, layers: int, n: int, vocab_size: int) -> LanguageModel:
    """Make a model for sequences of up to n tokens."""
    if variant not in SRMS:
        return models(layers, n, vocab_size)[variant](width)
    is_headless = SRMS[variant]["mixer"] in {"column", "kernel"}
    fixed = {"decay": False, "use_projections": not is_headless}
    sizes = (width, layers, 1 if is_headless else HEADS, n, vocab_size)
    return SRM(ModelConfig(*sizes, **(fixed | SRMS[variant])))
