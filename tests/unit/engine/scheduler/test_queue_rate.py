"""How long the queue takes, from how fast it went."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.scheduler.queue_rate import LONGEST_S, WINDOW_S, QueueRate


def test_the_queue_goes_on_as_it_went() -> None:
    pace = QueueRate()
    for second in range(21):
        pace.note(5 * second, 100.0 + second)
    assert pace.seconds_until(50, 120.0) == 10
    assert pace.seconds_until(1, 120.0) == 1
    assert pace.seconds_until(10**9, 120.0) == LONGEST_S


def test_before_there_is_a_pace_it_is_a_second() -> None:
    pace = QueueRate()
    assert pace.seconds_until(1_000, 5.0) == 1
    pace.note(3, 5.0)
    assert pace.seconds_until(1_000, 5.1) == 1


def test_a_queue_that_stands_takes_longest() -> None:
    pace = QueueRate()
    for second in range(10):
        pace.note(7, float(second))
    assert pace.seconds_until(1, 9.0) == LONGEST_S


def test_what_was_long_ago_does_not_count() -> None:
    pace = QueueRate()
    pace.note(0, 0.0)
    pace.note(1_000_000, 1.0)
    pace.note(1_000_000, 2.0 + WINDOW_S)
    pace.note(1_000_020, 12.0 + WINDOW_S)
    assert pace.seconds_until(20, 12.0 + WINDOW_S) == 10


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
