"""Sequences without a slot: taken apart and put together again."""

from __future__ import annotations

import numpy as np

from srm.engine.state.parked import Parked, merged
from srm.engine.steps.batch import SlotStates


def parked(indices: list[int]) -> Parked:
    numbers = np.array(indices, np.int32)
    return Parked(
        indices=numbers.astype(np.int64),
        positions=10 + numbers,
        states=SlotStates(np.outer(numbers, np.ones(3)).astype(np.float32), 20 + numbers),
        tokens=tuple(number.tobytes() for number in numbers),
        logprobs=tuple(b"" for _ in indices),
    )


def assert_same(result: Parked, expected: Parked) -> None:
    for name in ("indices", "positions"):
        np.testing.assert_array_equal(getattr(result, name), getattr(expected, name))
    np.testing.assert_array_equal(result.states.states, expected.states.states)
    np.testing.assert_array_equal(result.states.last_tokens, expected.states.last_tokens)
    assert (result.tokens, result.logprobs) == (expected.tokens, expected.logprobs)


def test_parts_are_merged_by_index() -> None:
    assert_same(merged([parked([3, 7]), parked([1]), parked([2, 9])]), parked([1, 2, 3, 7, 9]))


def test_some_are_chosen() -> None:
    assert_same(parked([1, 4, 6]).only(np.array([0, 2])), parked([1, 6]))
    assert len(parked([1, 4, 6]).only(np.empty(0, np.int64))) == 0
    assert parked([1, 2]).nbytes > parked([1]).nbytes >= 128 + 3 * 4 + 4
