"""Recording by arrays is what the package does value by value; percentiles are near numpy's."""

from __future__ import annotations

import numpy as np
import pytest
from hdrh.histogram import HdrHistogram
from hypothesis import given
from hypothesis import strategies as st

from srm.errors import ConfigError
from srm.loadtest.histogram import LONGEST_S, Histogram
from srm.loadtest.quantities import PERCENTILES

units = st.one_of(st.integers(0, 5000), st.integers(0, 10**6 * int(LONGEST_S)))


def recorded(*times: float) -> Histogram:
    return Histogram(np.array(times))


@given(values=st.lists(st.tuples(units, st.integers(1, 4)), min_size=1, max_size=40))
def test_arrays_land_where_the_package_puts_single_values(values: list[tuple[int, int]]) -> None:
    theirs = HdrHistogram(1, 2**40, 3)
    for value, count in values:
        assert theirs.record_value(value, count)
    numbers, counts = np.array(values, np.int64).T
    ours = Histogram(numbers / 1e6, counts)
    assert bytes(ours.hdr.counts) == bytes(theirs.counts)
    assert ours.count == theirs.get_total_count()
    assert ours.hdr.encode() == theirs.encode()  # what other HDR tools read, extremes with it


def test_buckets_are_narrow_and_hold_all_that_was_recorded() -> None:
    times = np.random.default_rng(1).exponential(0.5, 5000)
    begins, ends, counts = Histogram(times).buckets()
    assert counts.sum() == 5000 and (counts > 0).all()
    assert (begins[1:] >= ends[:-1] - 1e-12).all()
    assert (ends - begins <= np.maximum(begins / 1000, 1.001e-6)).all()
    rounded = np.sort(np.rint(times * 1e6))
    first, last = (np.searchsorted(rounded, np.rint(edge * 1e6)) for edge in (begins, ends))
    assert (last - first == counts).all()


def test_percentiles_lie_within_the_extremes() -> None:
    result = recorded(5.1234567).distribution()
    assert {getattr(result, name) for name in (*PERCENTILES, "min", "max")} == {5.1234567}
    assert result.std == 0
    result = recorded(-0.5, 0.0, 0.0).distribution()  # in the buckets, a time below 0 is 0
    assert (result.min, result.p50, result.max) == (-0.5, 0.0, 0.0)


@pytest.mark.parametrize("time", [LONGEST_S * 1.01, float("nan"), float("inf")])
def test_what_no_bucket_holds_is_refused(time: float) -> None:
    with pytest.raises(ConfigError, match=r"a recorded time is .*; at most"):
        recorded(1.0, time)
