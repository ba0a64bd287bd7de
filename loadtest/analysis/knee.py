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
from typing import NamedTuple

import msgspec

_FLAT = 1.05
"""Throughput has stopped growing if two loads in a row bring less than this times the best."""


class Point(msgspec.Struct, frozen=True):
    """The measurement of one step of a sweep."""

    load: float
    throughput: float
    """Output tokens a second, or requests a second if no tokens were counted."""
    good_share: float
    """NaN without objectives."""


class Search(NamedTuple):
    """The target and the precision of a search."""

    loads: tuple[float, ...]
    """The loads to measure, ascending; empty: found by doubling and bisection."""
    first: float
    most: float
    whole: bool
    """Whether loads are whole numbers."""
    resolution: float
    """The largest relative gap allowed between the two loads around the turn."""
    repeats: int
    by_objectives: bool
    knee_share: float
    good_share: float


class Turn(NamedTuple):
    """The loads between which the predicate turned; None: not within what was measured."""

    below: float | None
    """The largest load before the turn."""
    above: float | None
    """The smallest load after the turn."""


def next_load(points: list[Point], search: Search) -> float | None:
    """Return the load to measure next; None when the search is done."""
    measured = _measured(points)
    for load in search.loads:
        if load not in measured:
            return load
    if not measured:
        return search.first
    turn = _turn(measured, search)
    if not search.loads:
        if _goes_on(measured, turn, search):
            return min(2 * max(measured), search.most)
        between = _between(turn, search)
        if between is not None:
            return between
    deciding = [*turn, None if search.by_objectives else _best(measured)]
    again = [load for load in deciding if load and len(measured[load]) < search.repeats]
    return min(again, key=lambda load: len(measured[load]), default=None)


def knee(points: list[Point], knee_share: float) -> float | None:
    """Return the smallest load with this share of the largest throughput; None if nothing came."""
    if not any(point.throughput > 0 for point in points):
        return None
    return _turned(_measured(points), _full(_measured(points), knee_share)).above


def largest_good(points: list[Point], good_share: float) -> float | None:
    """Return the largest load up to which the objectives held; None if they never did."""
    measured = _measured(points)
    turn = _turned(measured, _broken(measured, good_share))
    return max(measured) if turn.above is None else turn.below


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
        return Turn(loads[-1], None)
    return Turn(loads[first - 1] if first else None, loads[first])


def _turn(measured: dict[float, list[Point]], search: Search) -> Turn:
    if search.by_objectives:
        return _turned(measured, _broken(measured, search.good_share))
    return _turned(measured, _full(measured, search.knee_share))


def _goes_on(measured: dict[float, list[Point]], turn: Turn, search: Search) -> bool:
    """Whether the turn may still lie beyond the largest load."""
    loads = list(measured)
    if loads[-1] >= search.most:
        return False
    if search.by_objectives:
        return turn.above is None
    before = max((_throughput(measured[load]) for load in loads[:-2]), default=0.0)
    return any(_throughput(measured[load]) > _FLAT * before for load in loads[-2:])


def _between(turn: Turn, search: Search) -> float | None:
    """Return the geometric mean of the two loads around the turn; None if they are close enough."""
    if turn.below is None or turn.above is None:
        return None
    if turn.above <= turn.below * (1 + search.resolution):
        return None
    middle = math.sqrt(turn.below * turn.above)
    rounded = float(round(middle) if search.whole else f"{middle:.3g}")
    return rounded if turn.below < rounded < turn.above else None
