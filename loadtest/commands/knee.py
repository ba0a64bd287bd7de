"""Search for the load at which a server is full: the next load to measure, and the result so far.

The knee is the smallest load whose throughput is at least `knee_share` of the largest measured.
With objectives there is another answer: the largest load up to which at least `good_share` of the
requests met them. Each is a turn of a predicate: false for small loads, true for large ones. So
both are searched alike: double the load until the turn is past, then take the geometric mean of its
two neighbours until they are `resolution` apart. A load counts by the median of its measurements,
and the deciding loads are measured `repeats` times. Pure: sends nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import median
from typing import Literal

import msgspec

from srm.loadtest.scenario import must

_FLAT = 1.05
"""Throughput has stopped growing if two loads in a row bring less than this times the best."""


class Point(msgspec.Struct, frozen=True):
    """The measurement of one step of a sweep."""

    load: float
    throughput: float
    """Output tokens a second, or requests a second if no tokens were counted."""
    good_share: float
    """Fraction of the requests that met the objectives; NaN without objectives."""


class SweepConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of `srm loadtest sweep`, beside those of a scenario."""

    sweep: Literal["concurrency", "rate"] = "concurrency"
    """Raise the number of concurrent requests from step to step, or the rate of arrivals; this
    replaces the scenario's own. Arrivals are constant where the scenario's are, else poisson."""
    loads: tuple[float, ...] = ()
    """These and no others. Empty: doubled until the server is full, then what lies between."""
    first_load: float = 1.0
    """Load to begin with, where `loads` is empty."""
    max_load: float = 1024.0
    """Largest load, where `loads` is empty."""
    settle_s: float = 2.0
    """Seconds that each step runs before its `warmup_s` and `duration_s` begin."""
    resolution: float = 0.2
    """Largest gap between the two loads between which the server gets full, as a fraction of the
    lower."""
    repeats: int = 3
    """Measurements of each load that decides; the median counts."""
    knee_share: float = 0.9
    """Fraction of the largest throughput that the knee, the smallest such load, must reach."""
    good_share: float = 0.99
    """Fraction of the requests that must meet the objectives, where there are any."""

    def __post_init__(self) -> None:
        for name in ("first_load", "max_load", "resolution"):
            must(self, 0 < getattr(self, name) < math.inf, name, "above 0")
        for name in ("knee_share", "good_share"):
            must(self, 0 < getattr(self, name) <= 1, name, "above 0 and at most 1")
        must(self, 0 <= self.settle_s < math.inf, "settle_s", "at least 0")
        must(self, self.repeats >= 1, "repeats", "at least 1")
        must(self, self.first_load <= self.max_load, "first_load", "at most max_load")
        if self.loads:
            self._check_loads("loads", self.loads)
        else:
            self._check_loads("first_load", (self.first_load,))
            self._check_loads("max_load", (self.max_load,))

    def _check_loads(self, name: str, loads: tuple[float, ...]) -> None:
        is_whole = self.sweep == "concurrency"
        for load in loads:
            if not 0 < load < math.inf or (is_whole and not load.is_integer()):
                allowed = "whole numbers of at least 1" if is_whole else "above 0"
                raise ValueError(f"{name} must be {allowed} for a {self.sweep}, got {load}")


Turn = tuple[float | None, float | None]
"""The loads between which the predicate turned: the largest before, and the smallest after, each
None if it is not within what was measured."""


def next_load(points: list[Point], config: SweepConfig, by_objectives: bool) -> float | None:
    """Return the load to measure next; None when the search is done.

    Searches for the knee, or `by_objectives` for the largest good load.
    """
    measured = _measured(points)
    wanted = config.loads or (() if measured else (config.first_load,))
    if left := set(wanted) - measured.keys():
        return min(left)
    if by_objectives:
        turn = _turned(measured, _broken(measured, config.good_share))
    else:
        turn = _turned(measured, _full(measured, config.knee_share))
    if not config.loads:
        if _goes_on(measured, turn, config, by_objectives):
            return min(2 * max(measured), config.max_load)
        if (between := _between(turn, config)) is not None:
            return between
    deciding = [*turn, None if by_objectives else _best(measured)]
    again = [load for load in deciding if load and len(measured[load]) < config.repeats]
    return min(again, key=lambda load: len(measured[load]), default=None)


def knee(points: list[Point], knee_share: float) -> float | None:
    """Return the smallest load with this share of the largest throughput; None if nothing came."""
    if not any(point.throughput > 0 for point in points):
        return None
    return _turned(_measured(points), _full(_measured(points), knee_share))[1]


def largest_good(points: list[Point], good_share: float) -> float | None:
    """Return the largest load up to which the objectives held; None if they never did."""
    measured = _measured(points)
    below, above = _turned(measured, _broken(measured, good_share))
    return max(measured) if above is None else below


def grows_still(points: list[Point]) -> bool:
    """Whether the largest load brought clearly more than any other: the knee may lie beyond."""
    measured = _measured(points)
    most = max(measured)
    others = [_throughput(measured[load]) for load in measured if load != most]
    return _throughput(measured[most]) > _FLAT * max(others, default=0.0)


def _measured(points: list[Point]) -> dict[float, list[Point]]:
    """Group the points by load, ascending."""
    loads = sorted({point.load for point in points})
    return {load: [point for point in points if point.load == load] for load in loads}


def _throughput(of_load: list[Point]) -> float:
    return median(point.throughput for point in of_load)


def _best(measured: dict[float, list[Point]]) -> float:
    return max(measured, key=lambda load: _throughput(measured[load]))


def _full(measured: dict[float, list[Point]], share: float) -> Callable[[float], bool]:
    enough = share * _throughput(measured[_best(measured)])
    return lambda load: _throughput(measured[load]) >= enough


def _broken(measured: dict[float, list[Point]], good: float) -> Callable[[float], bool]:
    return lambda load: not median(point.good_share for point in measured[load]) >= good


def _turned(measured: dict[float, list[Point]], is_past: Callable[[float], bool]) -> Turn:
    loads = list(measured)
    first = next((at for at, load in enumerate(loads) if is_past(load)), None)
    if first is None:
        return loads[-1], None
    return loads[first - 1] if first else None, loads[first]


def _goes_on(
    measured: dict[float, list[Point]], turn: Turn, config: SweepConfig, by_objectives: bool
) -> bool:
    """Whether the turn may still lie beyond the largest load."""
    loads = list(measured)
    if loads[-1] >= config.max_load:
        return False
    if by_objectives:
        return turn[1] is None
    before = max((_throughput(measured[load]) for load in loads[:-2]), default=0.0)
    return any(_throughput(measured[load]) > _FLAT * before for load in loads[-2:])


def _between(turn: Turn, config: SweepConfig) -> float | None:
    """Return the geometric mean of the two loads around the turn; None if they are close enough."""
    below, above = turn
    if below is None or above is None or above <= below * (1 + config.resolution):
        return None
    middle = math.sqrt(below * above)
    is_whole = config.sweep == "concurrency"
    rounded = float(round(middle) if is_whole else f"{middle:.3g}")
    return rounded if below < rounded < above else None
