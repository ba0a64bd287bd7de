"""Histograms of times with fixed relative precision (HDR).

Buckets, their numbers and the percentiles are those of the package hdrhistogram. Only recording is
done here, by arrays, because the package takes one value at a time.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from srm.errors import ConfigError
from srm.loadtest.quantities import PERCENTILES
from srm.loadtest.recording import Counts, Times
from srm.loadtest.summary import Distribution

try:
    from hdrh.histogram import HdrHistogram
except ImportError:  # `srm loadtest` says so before it works; help and objectives need none
    HdrHistogram = None

UNITS = 1e6  # per second: microseconds
DIGITS = 3
"""A bucket is never wider than 1/1024 of its values, or one unit."""
LONGEST_S = float(2**40 // 10**6)
"""About 12 days."""


class Histogram:
    """Counts of times. Count, mean, deviation and extremes are exact."""

    def __init__(self, seconds: Times, counts: Counts | None = None) -> None:
        """Count each time once, or as often as `counts` says (at least once).

        The buckets hold a time below 0, as clocks may give, as 0. Raises ConfigError for NaN and
        for what is longer than LONGEST_S.
        """
        self.hdr: Any = HdrHistogram(1, 2**40, DIGITS)
        """As the package and other tools have it."""
        self.counts = np.frombuffer(self.hdr.counts, np.uint64)
        """Its counts, in the same memory."""
        if not len(seconds):
            return
        if not (seconds <= LONGEST_S).all():  # nor is NaN
            raise ConfigError(f"a recorded time is {seconds.max()} s; at most {LONGEST_S:.0f} s is")
        hdr = self.hdr
        units = np.rint(np.maximum(seconds, 0) * UNITS).astype(np.int64)
        _, bits = np.frexp(units | hdr.sub_bucket_mask)  # as many bits as the number has
        half = hdr.sub_bucket_half_count_magnitude
        bucket = bits.astype(np.int64) - (half + 1)
        index = (bucket << half) + (units >> bucket)
        self.counts += np.bincount(index, counts, len(self.counts)).astype(np.uint64)
        hdr.min_value, hdr.max_value = int(units.min()), int(units.max())
        hdr.total_count = int(self.counts.sum())
        self._mean = float(np.average(seconds, weights=counts))
        self._variance = float(np.average((seconds - self._mean) ** 2, weights=counts))
        self._min, self._max = float(seconds.min()), float(seconds.max())

    @property
    def count(self) -> int:
        return int(self.hdr.total_count)

    def distribution(self) -> Distribution:
        """Return the statistics. Percentiles are upper ends of buckets, within the extremes."""
        if not self.count:
            return Distribution(0, *[math.nan] * 9)
        units = self.hdr.get_percentile_to_value_dict(list(PERCENTILES.values()))
        percentiles = {
            name: min(max(units[share] / UNITS, self._min), self._max)
            for name, share in PERCENTILES.items()
        }
        return Distribution(
            count=self.count,
            mean=self._mean,
            std=math.sqrt(self._variance),
            min=self._min,
            max=self._max,
            **percentiles,
        )

    def buckets(self) -> tuple[Times, Times, Counts]:
        """Return start and end, in seconds, and count of each bucket that is not empty, sorted."""
        filled = np.flatnonzero(self.counts)
        begins = [self.hdr.get_value_from_index(int(index)) for index in filled]
        ends = [self.hdr.get_highest_equivalent_value(value) + 1 for value in begins]
        scaled = np.array([begins, ends], np.float64) / UNITS
        return scaled[0], scaled[1], self.counts[filled].astype(np.int64)
