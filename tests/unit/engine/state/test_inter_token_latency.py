"""Pace against a clock kept for every slot."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from srm.engine.state.latency import InterTokenLatency

NUM_SLOTS = 12


def turn_of(running: list[int], begin: int, limit: int) -> list[int]:
    """The running slots from `begin` on, past the last one if need be."""
    from_there = [slot for slot in running if slot >= begin]
    return (from_there + [slot for slot in running if slot < begin])[:limit]


@settings(max_examples=60)
@given(
    steps=st.lists(
        st.tuples(
            st.sets(st.integers(0, NUM_SLOTS - 1), min_size=1),
            st.integers(1, NUM_SLOTS),
            st.sampled_from([False, False, True]),
        ),
        max_size=30,
    )
)
def test_gaps_are_those_of_every_slot(steps: list[tuple[set[int], int, bool]]) -> None:
    """Each step says which slots run from now on, how many of them a step has room for, and
    whether those with an even number go first."""
    # Few, so that steps are numbered anew now and then.
    pace, begin = InterTokenLatency(NUM_SLOTS, most_steps=3), 0
    running: set[int] = set()
    served_at: dict[int, float] = {}  # of the running slots that were served
    for now, (wanted, limit, is_mixed) in enumerate(steps, 1):
        # Odd ones are new sequences in the slots of old ones.
        served_at = {slot: at for slot, at in served_at.items() if slot in wanted and slot % 2 == 0}
        running = wanted
        is_partial = len(running) > limit
        chosen = turn_of(sorted(running), begin if is_partial else 0, limit)
        if is_partial and is_mixed:
            chosen = sorted(sorted(running), key=lambda slot: slot % 2)[:limit]
        elif is_partial:
            begin = chosen[-1] + 1
        first = [slot for slot in chosen if slot not in served_at]
        expected = Counter(now - served_at[slot] for slot in chosen if slot in served_at)
        counts: Counter[float] = Counter()
        rows = np.array(chosen), np.array(first, np.int64)
        for gap, count in pace.serve(*rows, is_partial, float(now)):
            counts[gap] += count
        assert counts == expected
        last = [served_at.get(slot) for slot in sorted(running)]
        known = pace.last(np.array(sorted(running)))
        assert all(item in (None, there) for item, there in zip(last, known, strict=True)) or chosen
        served_at |= dict.fromkeys(chosen, now)


def test_times_of_steps_stay_few() -> None:
    pace, most = InterTokenLatency(1_000, most_steps=50), 0
    for step in range(5_000):
        begin = step * 100 % 900  # the last hundred slots are never served
        slots = np.arange(begin, begin + 100)
        pace.serve(slots, slots[:0], True, float(step))
        most = max(most, len(pace.times))
    assert most == 50
    assert pace.last(np.array([0, 899, 999])).tolist() == [4995.0, 4994.0, 0.0]
