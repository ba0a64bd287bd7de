"""An op that is measured alone, as a graph of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from max.graph import BufferType, TensorType

from research.bench.engine.feeds import Array

Inputs = list[BufferType | TensorType]
Feed = Callable[[int], list[Array]]


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """Its graph's input types, the call that builds it, and its input arrays by rows."""

    types: Inputs
    call: Callable[..., Any]
    feed: Feed
    weight: int | None = None  # the input that is another copy in each call
    bound: tuple[int, int] | None = None  # (K, N) of a weight that is no input, named as the op
    bits: Array | None = None  # [N, K] of such a weight in FLOAT8
