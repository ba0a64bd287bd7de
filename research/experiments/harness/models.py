"""The models that are compared: variants of SRM, Transformer, masked mixer, Mamba 2, RWKV-4."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from srm.engine.config import ModelConfig
from srm.training.baselines.mamba2 import Mamba2, Mamba2Shape
from srm.training.baselines.masked_mixer import MaskedMixerModel, MaskedMixerShape
from srm.training.baselines.rwkv4 import RWKV4, RWKV4Shape
from srm.training.baselines.transformer import Transformer, TransformerShape
from srm.training.model import SRM, LanguageModel

REFERENCE = "SRM"
"""Model that the others are compared with."""
HEADS = 4
"""Heads of attention and mixers. As in the paper, Mamba 2 has twice as many, each with its own B
and C, and a state of half its width: its 14 d² parameters a block are those that the paper counts.
"""
IN_FLOAT32 = ("RWKV-4",)
"""Models whose products are in float32 whatever the machine has: the paper found this one unstable
in half precision."""
MULTIPLE = 2 * HEADS
"""Number that the width of every model is a multiple of."""
SRMS: dict[str, dict[str, Any]] = {
    "row": {"mixer": "row"},
    "column": {"mixer": "column"},
    "column heads": {"mixer": "column_heads"},
    "combined": {"mixer": "combined"},
    "combined decay": {"mixer": "combined", "decay": True},
    "mixed": {"mixer": "mixed"},
    "mixed decay": {"mixer": "mixed", "decay": True},
    "mixed no projections": {"mixer": "mixed", "use_projections": False},
    "mixed decay no projections": {"mixer": "mixed", "decay": True, "use_projections": False},
    "parallel": {"mixer": "parallel"},
    "parallel decay": {"mixer": "parallel", "decay": True},
    "diagonal": {"mixer": "diagonal"},
    "diagonal decay": {"mixer": "diagonal", "decay": True},
    "kernel 4": {"mixer": "kernel", "kernel_size": 4},
    "kernel 8": {"mixer": "kernel", "kernel_size": 8},
}
"""The variants of SRM, as settings of ModelConfig: without decay where it is not named, and
projected with heads."""
SRMS |= {
    "plain heads": SRMS["column heads"],
    "parallel heads": SRMS["parallel decay"],
    "headless": SRMS["column"],
}

PASSES = 3
"""Products of a forward and a backward pass, in those of the forward pass."""

MakeModel = Callable[[int], LanguageModel]
"""Function from a width to a new model."""


def model_makers(layers: int, n: int, vocab_size: int) -> dict[str, MakeModel]:
    """Return by name the functions that make the models, with `layers` blocks and for sequences of
    up to n tokens."""
    return {
        REFERENCE: lambda d: SRM(ModelConfig(d, layers, HEADS, n, vocab_size)),
        "Transformer": lambda d: Transformer(TransformerShape(d, layers, HEADS, 2 * d, vocab_size)),
        "masked mixer": lambda d: MaskedMixerModel(
            MaskedMixerShape(d, layers, HEADS, n, vocab_size)
        ),
        "Mamba 2": lambda d: Mamba2(
            Mamba2Shape(d, layers, 2 * HEADS, 2 * HEADS, d // 2, vocab_size)
        ),
        "RWKV-4": lambda d: RWKV4(RWKV4Shape(d, layers, vocab_size)),
    }


def make_variant(variant: str, width: int, layers: int, n: int, vocab_size: int) -> LanguageModel:
    """Make a variant of SRM or another model, for sequences of up to n tokens."""
    if variant not in SRMS:
        return model_makers(layers, n, vocab_size)[variant](width)
    is_headless = SRMS[variant]["mixer"] in {"row", "column", "kernel"}
    fixed = {"decay": False, "use_projections": not is_headless}
    sizes = (width, layers, 1 if is_headless else HEADS, n, vocab_size)
    return SRM(ModelConfig(*sizes, **(fixed | SRMS[variant])))


def count_flops(model: LanguageModel, length: int) -> int:
    """Return the operations of the products of a forward and a backward pass over one sequence, as
    torch counts them."""
    ids = torch.zeros(1, length, dtype=torch.int64, device=next(model.parameters()).device)
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):  # all products are counted
        model(ids)
    return PASSES * counter.get_total_flops()
