"""How long the queue takes, from how fast it went."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from srm.engine.scheduler.wait_queues import LONGEST_S, WINDOW_S, QueueRate

GOES = [(5 * second, 100.0 + second) for second in range(21)]
STANDS = [(7, float(second)) for second in range(10)]
LONG_AGO = [(0, 0.0), (10**6, 1.0), (10**6, 2.0 + WINDOW_S), (1_000_020, 12.0 + WINDOW_S)]


@pytest.mark.parametrize(
    ("noted", "count", "now", "seconds"),
    [
        (GOES, 50, 120.0, 10),
        (GOES, 1, 120.0, 1),
        (GOES, 10**9, 120.0, LONGEST_S),
        ([], 1_000, 5.0, 1),
        ([(3, 5.0)], 1_000, 5.1, 1),
        (STANDS, 1, 9.0, LONGEST_S),
        (LONG_AGO, 20, 12.0 + WINDOW_S, 10),
    ],
)
def test_the_queue_goes_on_as_it_went(
    noted: list[tuple[int, float]], count: int, now: float, seconds: int
) -> None:
    pace = QueueRate()
    for left, when in noted:
        pace.note(left, when)
    assert pace.seconds_until(count, now) == seconds


@given(
    st.lists(st.tuples(st.floats(0, 100), st.integers(0, 10**6))),
    st.integers(0, 10**7),
    st.floats(0, 1_000),
)
def test_it_is_always_something_a_client_obeys(
    steps: list[tuple[float, int]], count: int, later: float
) -> None:
    pace, now, left = QueueRate(), 0.0, 0
    for seconds, more in steps:
        now, left = now + seconds, left + more
        pace.note(left, now)
    assert 1 <= pace.seconds_until(count, now + later) <= LONGEST_S
