"""What PTX instructions compute, as numpy functions by their names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    **{name: getattr(np, to) for name, to in
       (("eq", "equal"), ("ne", "not_equal"), ("lt", "less"), ("le", "less_equal"),
        ("gt", "greater"), ("ge", "greater_equal"))},
    "nan": lambda a, b: np.isnan(a) | np.isnan(b),
    "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
}  # fmt: skip


def _or_unordered(compare: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda a, b: compare(a, b) | np.isnan(a) | np.isnan(b)


COMPARISONS |= {
    name + "u": _or_unordered(COMPARISONS[name]) for name in ("eq", "ne", "lt", "le", "gt", "ge")
}

BINARY: dict[str, Callable[[Any, Any], Any]] = {
    **{name: getattr(np, to) for name, to in
       (("add", "add"), ("sub", "subtract"), ("mul", "multiply"), ("min", "minimum"),
        ("max", "maximum"), ("and", "bitwise_and"), ("or", "bitwise_or"), ("xor", "bitwise_xor"))},
    "shl": lambda a, b: np.where(b < 8 * a.dtype.itemsize, a << (b % (8 * a.dtype.itemsize)), 0),
    "shr": lambda a, b: a >> np.minimum(b, 8 * a.dtype.itemsize - 1)
    if a.dtype.kind == "i"
    else np.where(b < 8 * a.dtype.itemsize, a >> (b % (8 * a.dtype.itemsize)), 0),
}  # fmt: skip
UNARY: dict[str, Callable[[Any], Any]] = {
    "neg": np.negative, "abs": np.abs, "ex2": np.exp2, "lg2": np.log2, "sqrt": np.sqrt,
    "rcp": lambda a: 1 / a, "rsqrt": lambda a: 1 / np.sqrt(a), "mov": lambda a: a,
    "cvta": lambda a: a, "not": np.invert,
}  # fmt: skip


def without_denormals(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """What `ftz` does: flush to zero."""
    return np.where(np.abs(values) < np.finfo(np.float32).tiny, np.float32(0), values)
