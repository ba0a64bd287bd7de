"""The measures of a summary by name, and how numbers are written for people. Values are in SI units
until they are written; a column has one unit, which stands in its head.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal, NamedTuple

from srm.loadtest.summary import Distribution, Summary

Kind = Literal["seconds", "requests_per_s", "tokens_per_s", "share", "count"]
NAN = float("nan")


class Measure(NamedTuple):
    """One number of a summary."""

    key: str
    """Name in the columns of summary.csv, without the unit."""
    label: str
    kind: Kind
    better: int
    """1: more is better; -1: less is; 0: neither."""


DISTRIBUTIONS = {
    "ttft": "TTFT",
    "ttft_sent": "TTFT from sending",
    "itl": "ITL",
    "gap": "Gap between reads",
    "tpot": "TPOT",
    "e2e": "E2E",
    "e2e_sent": "E2E from sending",
    "queue": "Queue",
    "lateness": "Lateness",
}
"""Fields of a summary that are distributions, and their labels."""

PERCENTILES = {"p50": 50.0, "p90": 90.0, "p95": 95.0, "p99": 99.0, "p999": 99.9}

_SCALARS = (
    Measure("output_tokens_per_s", "Output tokens", "tokens_per_s", 1),
    Measure("prompt_tokens_per_s", "Prompt tokens", "tokens_per_s", 1),
    Measure("completed_per_s", "Completed", "requests_per_s", 1),
    Measure("planned_per_s", "Planned", "requests_per_s", 0),
    Measure("good_per_s", "Goodput", "requests_per_s", 1),
    Measure("good_share", "Good", "share", 1),
    Measure("rejected_share", "Rejected", "share", -1),
    Measure("planned", "Requests planned", "count", 0),
    Measure("completed", "Requests completed", "count", 0),
    Measure("failed", "Requests failed", "count", -1),
    Measure("retried", "Requests retried", "count", -1),
    Measure("concurrency", "In flight, mean", "count", 0),
    Measure("concurrency_max", "In flight, most", "count", 0),
    Measure("checked", "Token counts checked", "count", 0),
    Measure("miscounted", "Token counts that differ", "count", -1),
    Measure("cpu_share", "Harness: busiest core", "share", 0),
    Measure("lag_max_s", "Harness: event loop late, most", "seconds", 0),
)


def statistic_name(statistic: str) -> str:
    """Return p99.9 for `p999`, other names unchanged."""
    return "p99.9" if statistic == "p999" else statistic


MEASURES = {
    measure.key: measure
    for measure in (
        *_SCALARS,
        *(
            Measure(
                f"{name}_{statistic}",
                f"{label} {statistic_name(statistic)}",
                "count" if statistic == "count" else "seconds",
                0 if statistic in {"count", "std"} or name == "lateness" else -1,
            )
            for name, label in DISTRIBUTIONS.items()
            for statistic in Distribution.__struct_fields__
        ),
    )
}
"""Every number of a summary, by key."""


def value_of(summary: Summary, key: str) -> float:
    """Return a measure of MEASURES, in SI units; NaN if nothing was measured."""
    if key == "failed":
        return float(sum(summary.errors.values()))
    name, _, statistic = key.rpartition("_")
    if name in DISTRIBUTIONS:
        return float(getattr(getattr(summary, name), statistic))
    return float(getattr(summary, key))


class Scale(NamedTuple):
    """The unit in which values of a column are written."""

    name: str
    factor: float

    def write(self, value: float) -> str:
        """Write three significant digits, no exponent, commas between thousands; a dash for NaN."""
        return number(value * self.factor)

    def head(self, label: str) -> str:
        """Return the column's head: the label, and the unit."""
        return f"{label} ({self.name})" if self.name else label


def number(value: float) -> str:
    """Write a value that is in its unit already, as Unit.write does."""
    if not math.isfinite(value):
        return "–" if math.isnan(value) else ("∞" if value > 0 else "-∞")
    size = abs(value)
    if float(value).is_integer() or size >= 99.95:
        return f"{value:,.0f}"
    decimals = 1 if size >= 9.995 else 2 if size >= 0.9995 else 3
    if size < 0.1:
        decimals = min(2 - math.floor(math.log10(size)), 9)
    return f"{value:,.{decimals}f}"


def unit_for(kind: Kind, values: Iterable[float]) -> Scale:
    """Return the unit in which the largest of these is easily read."""
    largest = max((abs(value) for value in values if math.isfinite(value)), default=0.0)
    if kind == "seconds":
        if largest >= 30:
            return Scale("s", 1.0)
        return Scale("ms", 1e3) if largest >= 1e-3 or largest == 0 else Scale("µs", 1e6)
    if kind == "share":
        return Scale("%", 100.0)
    if kind == "count":
        return Scale("", 1.0)
    name = "tok/s" if kind == "tokens_per_s" else "req/s"
    if largest >= 1e7:
        return Scale(f"M {name}", 1e-6)
    return Scale(f"k {name}", 1e-3) if largest >= 1e4 else Scale(name, 1.0)


def with_unit(kind: Kind, value: float) -> str:
    """Write one value with its own unit, for sentences and tiles."""
    unit = unit_for(kind, [value])
    return f"{unit.write(value)} {unit.name}".strip()
