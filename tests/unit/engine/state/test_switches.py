"""Switches: which weights made which tokens of the sequences that ran through changes."""

from __future__ import annotations

from array import array

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from srm.engine.state.switches import Switches


def versions(switches: Switches, sequence_id: int, start: int, stop: int) -> list[int]:
    return list(array("i", switches.versions(sequence_id, start, stop)))


def test_a_change_divides_the_tokens_of_what_ran() -> None:
    switches = Switches()
    switches.note(1, np.array([7, 3, 5]), np.array([2, 4, 0]))
    assert versions(switches, 7, 0, 5) == [1, 1, 2, 2, 2]
    assert versions(switches, 3, 3, 5) == [1, 2]
    assert versions(switches, 5, 0, 2) == [], "it had no token"
    assert versions(switches, 7, 2, 5) == [], "all of them are of the weights in use"
    assert switches.have_met(np.array([3, 4, 5, 7])).tolist() == [True, False, False, True]
    switches.note(2, np.array([3, 5]), np.array([6, 1]))
    assert versions(switches, 3, 0, 8) == [1, 1, 1, 1, 2, 2, 3, 3]
    assert versions(switches, 5, 0, 2) == [2, 3]


def test_what_has_ended_is_forgotten_with_the_next_change() -> None:
    switches = Switches()
    switches.note(1, np.array([1]), np.array([3]))
    switches.note(2, np.array([2]), np.array([3]))
    assert not switches.have_met(np.array([1])).any()
    switches.note(3, np.empty(0, np.int64), np.empty(0, np.int64))
    assert not switches.have_met(np.array([2])).any()


@given(st.lists(st.lists(st.integers(0, 3), min_size=3, max_size=3), max_size=6))
def test_any_history_is_told_as_it_was(history: list[list[int]]) -> None:
    """Between two changes each of three sequences makes so many tokens."""
    switches = Switches()
    made: list[list[int]] = [[], [], []]
    for version, counts in enumerate(history, 1):
        for own, count in zip(made, counts, strict=True):
            own.extend([version] * count)
        switches.note(version, np.arange(3), np.array([len(own) for own in made]))
    last = len(history) + 1
    for sequence_id, own in enumerate(made):
        result = versions(switches, sequence_id, 0, len(own) + 1)
        assert (result or [last]) == ([*own, last])
