"""The search for the load at which a server is full, against servers of known capacity."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.commands.knee import Point, SweepConfig, grows_still, knee, largest_good, next_load

NAN = float("nan")


def found(
    measure: Callable[[float], Point], by_objectives: bool = False, **given: Any
) -> list[Point]:
    """The points of a whole search."""
    config, points = SweepConfig(**{"max_load": 4096.0} | given), list[Point]()
    while (load := next_load(points, config, by_objectives)) is not None:
        points.append(measure(load))
        assert len(points) < 200, "it does not end"
    return points


@given(slots=st.integers(1, 1500))
def test_a_server_with_slots_is_full_where_nine_tenths_of_them_are_busy(slots: int) -> None:
    points = found(lambda load: Point(load, min(load, slots) * 20.0, NAN))
    at = knee(points, 0.9)
    assert at is not None and 0.9 * slots <= at <= max(0.9 * slots * 1.2 + 1, 1)
    assert len(points) <= 35
    assert not grows_still(points)


@given(slots=st.integers(2, 2000), seed=st.integers(0, 2**32), noise=st.floats(0, 0.04))
def test_noise_moves_it_by_less_than_a_factor_of_two(slots: int, seed: int, noise: float) -> None:
    rng = np.random.default_rng(seed)
    at = knee(found(lambda load: Point(load, min(load, slots) * rng.normal(1, noise), NAN)), 0.9)
    assert at is not None and slots / 2 <= at <= slots * 2


@given(capacity=st.floats(0.5, 900))
def test_rates_are_found_as_well_as_numbers(capacity: float) -> None:
    """By throughput, and by objectives that hold up to a limit."""
    rate: dict[str, Any] = {"sweep": "rate", "first_load": 0.25, "resolution": 0.1}
    at = knee(found(lambda load: Point(load, min(load, capacity), NAN), **rate), 0.9)
    assert at is not None
    assert 0.9 * capacity <= at * (1 + 1e-9) and at <= max(0.9 * capacity * 1.1, 0.25) * (1 + 1e-9)
    good = found(lambda load: Point(load, 7.0, 1.0 if load <= capacity else 0.5), True, **rate)
    at = largest_good(good, 0.99)
    assert at is not None and at <= capacity < at * 1.1 * (1 + 1e-9)


def test_what_decides_is_measured_again() -> None:
    points = found(lambda load: Point(load, min(load, 20), NAN))
    counts = {load: sum(p.load == load for p in points) for load in {p.load for p in points}}
    at = knee(points, 0.9)
    assert at is not None and counts[at] == 3
    assert counts[max(load for load in counts if load < at)] == 3
    assert sum(counts.values()) < 3 * len(counts), "the others are not"


def test_one_bad_measurement_does_not_decide() -> None:
    """The first time that 8 is measured half of the throughput is missing."""
    seen: list[float] = []

    def measure(load: float) -> Point:
        seen.append(load)
        is_bad = load == 8 and seen.count(8) == 1
        return Point(load, min(load, 100) * (0.4 if is_bad else 1.0), 0.1 if is_bad else 1.0)

    assert knee(found(measure), 0.9) in {float(load) for load in range(90, 110)}
    seen.clear()
    assert largest_good(found(measure, True, max_load=64.0), 0.99) == 64


def test_only_loads_that_are_allowed_are_measured() -> None:
    points = found(lambda load: Point(load, min(load, 12), NAN), loads=(100.0, 1.0, 10.0, 1.0))
    assert {point.load for point in points} == {1.0, 10.0, 100.0}
    assert [point.load for point in points[:3]] == [1.0, 10.0, 100.0]
    assert (knee(points, 0.9), knee(points, 0.8)) == (100, 10)
    points = found(lambda load: Point(load, load, NAN), max_load=50.0)
    assert max(point.load for point in points) == 50
    assert grows_still(points)


@pytest.mark.parametrize("broken", [0.0, 0.98, NAN])
def test_there_may_be_no_answer(broken: float) -> None:
    points = found(lambda load: Point(load, 1.0, broken), by_objectives=True)
    assert largest_good(points, 0.99) is None
    assert [point.load for point in points] == [1.0] * 3
    nothing = found(lambda load: Point(load, 0.0, NAN))
    assert knee(nothing, 0.9) is None
    assert len(nothing) < 15


@given(st.lists(st.tuples(st.integers(1, 64), st.floats(0, 1e6)), min_size=1, max_size=40))
def test_the_knee_is_the_smallest_load_with_enough_whatever_was_measured(
    pairs: list[tuple[int, float]],
) -> None:
    medians = {
        load: float(np.median([each for at, each in pairs if at == load])) for load, _ in pairs
    }
    enough = [load for load, brought in medians.items() if brought >= 0.9 * max(medians.values())]
    at = knee([Point(load, throughput, NAN) for load, throughput in pairs], 0.9)
    if at is None:
        assert not any(brought > 0 for _, brought in pairs)
    else:
        assert at == min(enough) and math.isfinite(at)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"resolution": 0.0}, "resolution must be above 0"),
        ({"knee_share": 1.5}, "knee_share must be above 0 and at most 1"),
        ({"settle_s": -1.0}, "settle_s must be at least 0"),
        ({"repeats": 0}, "repeats must be at least 1"),
        ({"first_load": 8.0, "max_load": 4.0}, "first_load must be at most max_load"),
        ({"loads": (1.5,)}, "loads must be whole numbers"),
        ({"max_load": 2.5}, "max_load must be whole numbers"),
        ({"sweep": "rate", "loads": (0.0,)}, "loads must be above 0 for a rate"),
    ],
)
def test_what_cannot_be_is_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SweepConfig(**settings)
