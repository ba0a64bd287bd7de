"""What a good request meets (`ttft<500ms`), and conditions on a summary (`ttft_p99>0.5`).

Both are a name, a comparison and a number. Knows no recordings.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from engine.errors import ConfigError
from loadtest.summary import Distribution, Summary

OBJECTIVES = ("ttft", "tpot", "itl", "e2e")
"""What can be asked of a request: TTFT, TPOT of its slowest sample, its mean ITL, E2E."""
NEED_STREAMS = ("ttft", "tpot", "itl")
COMPARISONS: dict[str, Callable[[Any, float], Any]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
UNITS = {"s": 1.0, "ms": 1e-3}
_FORM = re.compile(r"\s*(\w+)\s*(<=|>=|<|>)\s*([\d.]+(?:e-?\d+)?)\s*(ms|s)?\s*")


@dataclass(frozen=True)
class Condition:
    """`name comparison limit`; times are in seconds."""

    text: str
    name: str
    comparison: str
    limit: float

    def holds(self, value: Any) -> Any:
        """Of a number, or of each of an array; never for NaN."""
        return COMPARISONS[self.comparison](value, self.limit)


def parse(text: str) -> Condition:
    """An objective of requests. Raises ConfigError if it is none."""
    found = _condition(text, OBJECTIVES, OBJECTIVES, "objective")
    if found.comparison not in {"<", "<="}:
        raise ConfigError(f"objective {text!r}: a limit from above is wanted, such as `ttft<0.5`")
    return found


def parse_condition(text: str) -> Condition:
    """A condition on a summary. Raises ConfigError if it is none."""
    return _condition(text, (*DISTRIBUTIONS, *NUMBERS), (*DISTRIBUTIONS, "lag_max_s"), "condition")


def check(summary: Summary, conditions: Iterable[str]) -> list[str]:
    """Those of the conditions that hold, in words.

    A condition on what was not measured is taken to hold: nothing shows that it does not. So is
    every condition where no request was planned in the window. Raises ConfigError for what is no
    condition.
    """
    held = []
    for condition in [parse_condition(text) for text in conditions]:
        value = measure(summary, condition.name)
        if not summary.planned:
            held.append(f"{condition.text}: no request was measured")
        elif math.isnan(value):
            held.append(f"{condition.text}: {condition.name} was not measured")
        elif condition.holds(value):
            held.append(f"{condition.text}: {condition.name} is {value:.6g}")
    return held


def measure(summary: Summary, name: str) -> float:
    """What the summary says by the name that conditions have for it."""
    if name in DISTRIBUTIONS:
        field, _, statistic = name.rpartition("_")
        return float(getattr(getattr(summary, field), statistic))
    if name == "errors":
        return float(sum(summary.errors.values()))
    if name == "error_share":
        return sum(summary.errors.values()) / summary.planned if summary.planned else math.nan
    return float(getattr(summary, name))


def _condition(text: str, names: Iterable[str], times: Iterable[str], kind: str) -> Condition:
    form = _FORM.fullmatch(text)
    if form is None:
        raise ConfigError(
            f"{kind} {text!r} is not a name, one of {' '.join(COMPARISONS)}, and a number"
            " that may have the unit s or ms"
        )
    name, comparison, number, unit = form.groups()
    if name not in names:
        raise ConfigError(f"{kind} {text!r}: {name} is none of {', '.join(names)}")
    if unit and name not in times:
        raise ConfigError(f"{kind} {text!r}: {name} is not a time and has no unit")
    try:
        limit = float(number) * UNITS[unit or "s"]
    except ValueError:
        raise ConfigError(f"{kind} {text!r}: {number} is not a number") from None
    return Condition(text.strip(), name, comparison, limit)


def _names() -> tuple[list[str], list[str]]:
    """Of what conditions may be about: times, and other numbers."""
    statistics = [name for name in Distribution.__struct_fields__ if name != "count"]
    times, numbers = [], ["errors", "error_share"]
    for field in msgspec.structs.fields(Summary):
        if field.type is Distribution:
            times += [f"{field.name}_{statistic}" for statistic in statistics]
        elif field.type in {int, float}:
            numbers.append(field.name)
    return times, numbers


DISTRIBUTIONS, NUMBERS = _names()
