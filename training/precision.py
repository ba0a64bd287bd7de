"""The precision of a training run's matrix products."""

from __future__ import annotations

import logging
import re
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path

import torch

from srm.training.settings import Precision

log = logging.getLogger(__name__)

_INSTRUCTIONS = re.compile(r"\b(avx512_bf16|amx_bf16|bf16)\b")
"""Flags in /proc/cpuinfo of processors that multiply bfloat16: two of x86-64, one of Arm."""


@cache
def choose_precision(asked: Precision, device: str, is_first: bool = True) -> Precision:
    """Return the precision asked for; for auto bfloat16, or float32 where the processor has no
    instructions for it. The first process says, once, what auto is, and what such products cost."""
    is_slow = device == "cpu" and not has_bfloat16()
    taken: Precision = asked
    if asked == "auto":
        taken = "float32" if is_slow else "bfloat16"
    if is_first and asked == "auto":
        why = ", since this processor has no instructions for bfloat16" if is_slow else ""
        log.info("precision = auto: %s%s", taken, why)
    elif is_first and is_slow and asked == "bfloat16":
        log.warning(
            "precision = bfloat16: this processor has no instructions for it, so training is 12 to "
            "57 times slower than in float32, which auto would take"
        )
    return taken


def has_bfloat16() -> bool:
    """Whether this machine's processor multiplies bfloat16, as far as /proc/cpuinfo says."""
    try:
        return bool(_INSTRUCTIONS.search(Path("/proc/cpuinfo").read_text()))
    except OSError:
        return False


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[None]:
    """Compute the matrix products within a `with` block in `precision`, which is not auto."""
    dtype = torch.bfloat16 if precision == "float32" else getattr(torch, precision)
    return torch.autocast(device.type, dtype, enabled=precision != "float32")
