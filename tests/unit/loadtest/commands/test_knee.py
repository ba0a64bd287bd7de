"""The search for the load at which a server is full, against servers of known capacity."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from srm.loadtest.commands.knee import (
    Point,
    SweepConfig,
    grows_still,
    knee,
    largest_good,
    next_load,
)

NAN = math.nan


def search_points(
    throughput: Callable[[float], float], good: Callable[[float], float] | None = None, **given: Any
) -> list[Point]:
    """The points of a whole search: for the knee, or for the largest good load."""
    config, points = SweepConfig(**{"max_load": 4096.0} | given), list[Point]()
    while (load := next_load(points, config, good is not None)) is not None:
        points.append(Point(load, throughput(load), good(load) if good else NAN))
        assert len(points) < 200, "it does not end"
    return points


def answer(at: float | None) -> float:
    assert at is not None
    return at


@given(slots=st.integers(1, 1500))
def test_a_server_with_slots_is_full_where_nine_tenths_of_them_are_busy(slots: int) -> None:
    points = search_points(lambda load: min(load, slots) * 20.0)
    assert 0.9 * slots <= answer(knee(points, 0.9)) <= max(0.9 * slots * 1.2 + 1, 1)
    assert len(points) <= 35
    assert not grows_still(points)


@given(slots=st.integers(2, 2000), seed=st.integers(0, 2**32), noise=st.floats(0, 0.04))
def test_noise_moves_it_by_less_than_a_factor_of_two(slots: int, seed: int, noise: float) -> None:
    rng = np.random.default_rng(seed)
    points = search_points(lambda load: min(load, slots) * rng.normal(1, noise))
    assert slots / 2 <= answer(knee(points, 0.9)) <= slots * 2


@given(capacity=st.floats(0.5, 900))
def test_rates_are_found_as_well_as_numbers(capacity: float) -> None:
    """By throughput, and by objectives that hold up to a limit."""
    rate: dict[str, Any] = {"sweep": "rate", "first_load": 0.25, "resolution": 0.1}
    at = answer(knee(search_points(lambda load: min(load, capacity), **rate), 0.9))
    assert 0.9 * capacity <= at * (1 + 1e-9) and at <= max(0.9 * capacity * 1.1, 0.25) * (1 + 1e-9)
    good = search_points(lambda load: 7.0, lambda load: 1.0 if load <= capacity else 0.5, **rate)
    at = answer(largest_good(good, 0.99))
    assert at <= capacity < at * 1.1 * (1 + 1e-9)


def test_what_decides_is_measured_again() -> None:
    points = search_points(lambda load: min(load, 20))
    counts = Counter(point.load for point in points)
    at = answer(knee(points, 0.9))
    assert counts[at] == counts[max(load for load in counts if load < at)] == 3
    assert len(points) < 3 * len(counts), "the others are not"


def test_one_bad_measurement_does_not_decide() -> None:
    """The first time that 8 is measured half of the throughput is missing."""
    seen: list[float] = []

    def missing(load: float, bad: float) -> float:
        seen.append(load)
        return bad if load == 8 and seen.count(8) == 1 else 1.0

    points = search_points(lambda load: min(load, 100) * missing(load, 0.4))
    assert 90 <= answer(knee(points, 0.9)) < 110
    seen.clear()
    points = search_points(lambda load: load, lambda load: missing(load, 0.1), max_load=64.0)
    assert largest_good(points, 0.99) == 64


def test_only_loads_that_are_allowed_are_measured() -> None:
    points = search_points(lambda load: min(load, 12), loads=(100.0, 1.0, 10.0, 1.0))
    assert {point.load for point in points} == {1.0, 10.0, 100.0}
    assert [point.load for point in points[:3]] == [1.0, 10.0, 100.0]
    assert (knee(points, 0.9), knee(points, 0.8)) == (100, 10)
    points = search_points(lambda load: load, max_load=50.0)
    assert max(point.load for point in points) == 50
    assert grows_still(points)


@pytest.mark.parametrize("broken", [0.0, 0.98, NAN])
def test_there_may_be_no_answer(broken: float) -> None:
    points = search_points(lambda load: 1.0, lambda load: broken)
    assert largest_good(points, 0.99) is None
    assert [point.load for point in points] == [1.0] * 3
    nothing = search_points(lambda load: 0.0)
    assert knee(nothing, 0.9) is None
    assert len(nothing) < 15


@given(st.lists(st.tuples(st.integers(1, 64), st.floats(0, 1e6)), min_size=1, max_size=40))
def test_the_knee_is_the_smallest_load_with_enough_whatever_was_measured(
    pairs: list[tuple[int, float]],
) -> None:
    medians = {load: np.median([each for at, each in pairs if at == load]) for load, _ in pairs}
    most = max(medians.values())
    at = knee([Point(load, throughput, NAN) for load, throughput in pairs], 0.9)
    if at is None:
        assert most == 0
    else:
        assert at == min(load for load, brought in medians.items() if brought >= 0.9 * most)


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
