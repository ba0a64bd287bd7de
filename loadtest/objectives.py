"""Objectives of requests (`ttft<500ms`), and conditions on a summary (`ttft_p99>0.5`).

Both are a name, a comparison and a number.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from srm.errors import ConfigError
from srm.loadtest.quantities import DISTRIBUTIONS, value_of
from srm.loadtest.recording import ERRORS
from srm.loadtest.summary import Distribution, Summary

OBJECTIVES = ("ttft", "tpot", "itl", "e2e")
"""Measures that an objective can use: TTFT, TPOT of the slowest sample, mean ITL, E2E."""
NEED_STREAMS = ("ttft", "tpot", "itl")
COMPARISONS: dict[str, Callable[[Any, float], Any]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}

_FIELDS = msgspec.structs.fields(Summary)
STATISTICS = tuple(name for name in Distribution.__struct_fields__ if name != "count")
TIMES = (*(f"{name}_{part}" for name in DISTRIBUTIONS for part in STATISTICS), "lag_max_s")
NUMBERS = (
    *("errors", "error_share"),
    *(f"errors_{kind}" for kind in ERRORS[1:]),
    *(field.name for field in _FIELDS if field.type in {int, float} and field.name not in TIMES),
)
ALLOWED = ", ".join(
    [f"{{{','.join(DISTRIBUTIONS)}}}_{{{','.join(STATISTICS)}}}", "lag_max_s", *NUMBERS]
)
"""Names that a condition can use: statistics of a distribution, and other numbers of a summary."""

UNITS = {"s": 1.0, "ms": 1e-3}
_FORM = re.compile(r"\s*(\w+)\s*(<=|>=|<|>)\s*(\d+\.?\d*(?:e-?\d+)?|\.\d+)\s*(ms|s)?\s*")


@dataclass(frozen=True)
class Condition:
    """`name comparison limit`; times are in seconds."""

    text: str
    name: str
    comparison: str
    limit: float

    def holds(self, value: Any) -> Any:
        """Compare a number, or each element of an array; false for NaN."""
        return COMPARISONS[self.comparison](value, self.limit)


def parse(text: str) -> Condition:
    """Parse an objective of requests. Raises ConfigError if it is none."""
    objective = _condition(text, "objective", OBJECTIVES, (), ", ".join(OBJECTIVES))
    if objective.comparison not in {"<", "<="}:
        raise ConfigError(f"objective {text!r}: a limit from above is wanted, such as `ttft<0.5`")
    return objective


def parse_condition(text: str) -> Condition:
    """Parse a condition on a summary. Raises ConfigError if it is none."""
    return _condition(text, "condition", TIMES, NUMBERS, ALLOWED)


def check(summary: Summary, conditions: Iterable[str]) -> list[str]:
    """Return the conditions that hold, in words.

    A condition on something that was not measured counts as holding, since nothing shows that it
    does not. So does every condition if no request was planned in the window. Raises ConfigError
    for a text that is no condition.
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
    """Return the number of the summary that a condition calls `name`."""
    kind = name.removeprefix("errors_")
    if kind != name:
        return float(summary.errors.get(kind, 0))
    failed = value_of(summary, "failed")
    if name == "error_share":
        return failed / summary.planned if summary.planned else math.nan
    return failed if name == "errors" else value_of(summary, name)


def _condition(
    text: str, kind: str, times: Collection[str], numbers: Collection[str], allowed: str
) -> Condition:
    form = _FORM.fullmatch(text)
    if form is None:
        raise ConfigError(
            f"{kind} {text!r} is not a name, one of {' '.join(COMPARISONS)}, and a number"
            " that may have the unit s or ms"
        )
    name, comparison, number, unit = form.groups()
    if name not in times and name not in numbers:
        raise ConfigError(f"{kind} {text!r}: {name} is none of {allowed}")
    if unit and name not in times:
        raise ConfigError(f"{kind} {text!r}: {name} is not a time and has no unit")
    return Condition(text.strip(), name, comparison, float(number) * UNITS[unit or "s"])
