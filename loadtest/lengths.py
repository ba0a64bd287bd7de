"""Distributions of whole numbers: the lengths of prompts and outputs, and how many samples.

Each is given by its quantile function, so that one uniform number of a request gives one length.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from statistics import NormalDist
from typing import Any

import msgspec

from srm.loadtest import lines

ALLOWED = (
    "a number such as 128, uniform:LOW,HIGH, normal:MEAN,STD, lognormal:MEDIAN,SIGMA, "
    "choice:1=0.9,64=0.1 or file:LENGTHS.jsonl, the middle ones perhaps with ,min=LOW or ,max=HIGH"
)
LONGEST = 2**31 - 1
"""The largest length that a recording can hold."""
_STANDARD = NormalDist()


class Lengths(msgspec.Struct, frozen=True):
    """One distribution, of numbers 1 … LONGEST."""

    at: Callable[[float], int]
    """The quantile at a share in (0, 1)."""
    smallest: int
    """A lower bound of all its numbers."""


def parse(text: str, field: str) -> Lengths:
    """Parse a distribution. Raises ValueError, and ConfigError for a file; both name the field."""
    kind, _, rest = text.partition(":")
    try:
        if kind == "file":
            return _of_file(Path(rest), field)
        if not rest:
            length = _whole(text)
            return Lengths(lambda _: length, length)
        if kind == "choice":
            return _choice(rest)
        if kind in _FAMILIES:
            return _family(kind, rest)
    except ValueError as error:
        raise ValueError(f"{field} = {text!r}: {error}; allowed is {ALLOWED}") from None
    raise ValueError(f"{field} must be {ALLOWED}, got {text!r}")


def check(text: str, field: str) -> None:
    """Raises ValueError if the text cannot be parsed; opens no file."""
    if not text.startswith("file:"):
        parse(text, field)


def _whole(text: str) -> int:
    length = int(text)
    if not 1 <= length <= LONGEST:
        raise ValueError(f"{text.strip()} is not 1 … {LONGEST}")
    return length


def _uniform(low: float, high: float) -> Callable[[float], float]:
    if not (1 <= low <= high <= LONGEST and low == int(low) and high == int(high)):
        raise ValueError("LOW and HIGH must be whole, and 1 ≤ LOW ≤ HIGH")
    return lambda share: low + math.floor(share * (high - low + 1))


def _normal(mean: float, std: float) -> Callable[[float], float]:
    if not (0 < mean < math.inf and 0 <= std < math.inf):
        raise ValueError("MEAN must be above 0, STD not below 0")
    return lambda share: mean + std * _STANDARD.inv_cdf(share)


def _lognormal(median: float, sigma: float) -> Callable[[float], float]:
    if not (0 < median < math.inf and 0 <= sigma <= 10):
        raise ValueError("MEDIAN must be above 0, SIGMA 0 … 10")
    return lambda share: median * math.exp(sigma * _STANDARD.inv_cdf(share))


_FAMILIES = {"uniform": _uniform, "normal": _normal, "lognormal": _lognormal}


def _family(kind: str, rest: str) -> Lengths:
    numbers, bounds = [], {"min": 1, "max": LONGEST}
    for part in rest.split(","):
        name, is_bound, value = part.partition("=")
        if not is_bound:
            numbers.append(float(part))
        elif name.strip() in bounds:
            bounds[name.strip()] = _whole(value)
        else:
            raise ValueError(f"{name!r} is neither min nor max")
    low, high = bounds["min"], bounds["max"]
    if len(numbers) != 2 or low > high:
        raise ValueError("it takes two numbers, and a min that is not above max")
    quantile = _FAMILIES[kind](*numbers)
    smallest = max(low, int(numbers[0])) if kind == "uniform" else low
    return Lengths(lambda share: round(min(max(quantile(share), low), high)), min(smallest, high))


def _choice(rest: str) -> Lengths:
    pairs = [part.partition("=") for part in rest.split(",")]
    numbers = [_whole(length) for length, _, _ in pairs]
    weights = [float(weight) for _, _, weight in pairs]
    if not all(0 <= weight < math.inf for weight in weights) or not sum(weights) > 0:
        raise ValueError("weights must not be below 0, and one above it")
    bounds = list(accumulate(weights))
    results = [length for length, weight in zip(numbers, weights, strict=True) if weight]
    return Lengths(lambda share: numbers[bisect_left(bounds, share * bounds[-1])], min(results))


def _of_file(path: Path, field: str) -> Lengths:
    allowed = f"a number of 1 … {LONGEST}, or an object whose {field} is one"
    values = []
    for length, line in lines.read(path, object, allowed):
        value: Any = line.get(field) if isinstance(line, dict) else line
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0.5 < value <= LONGEST:
            raise lines.bad_line(path, length, f"got {line!r}", allowed)
        values.append(max(1, round(value)))
    return Lengths(lambda share: values[int(share * len(values))], min(values))
