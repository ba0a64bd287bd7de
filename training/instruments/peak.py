"""How many FLOP a second this machine does at most, measured by a product of matrices."""

from __future__ import annotations

import time
from functools import cache

import torch

_SIZES = {"cpu": 512, "cuda": 4_096}
"""Rows of the square matrices: large enough for the product to fill the device."""
_TIMES = 10


@cache
def measured_peak(device: str, dtype: torch.dtype) -> float:
    """Return FLOP a second: two for each multiplication of the fastest of some products, which take
    a few milliseconds."""
    size = _SIZES[device]
    matrix = torch.ones(size, size, dtype=dtype, device=device)
    least = float("inf")
    for _ in range(_TIMES):
        _wait(device)
        began = time.perf_counter()
        torch.mm(matrix, matrix)
        _wait(device)
        least = min(least, time.perf_counter() - began)
    return 2 * size**3 / least


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
