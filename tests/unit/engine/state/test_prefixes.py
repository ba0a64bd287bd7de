"""Which prefixes are found, kept and given up."""

from __future__ import annotations

import numpy as np
import pytest

from engine.state.prefixes import Prefix, Prefixes
from engine.steps.batch import I32

ORDER = (0, 0)


def ids(*tokens: int) -> I32:
    return np.array(tokens, np.int32)


def keep(prefixes: Prefixes, *tokens: int) -> Prefix:
    """Make the state after these tokens, and let go of it."""
    prefix = prefixes.claim(ids(*tokens), ORDER)
    assert prefix is not None
    prefixes.finish(prefix)
    prefixes.release(prefix)
    return prefix


def test_the_longest_state_of_a_beginning_is_found_at_any_length() -> None:
    prefixes = Prefixes(range(10, 20))
    kept = {n: keep(prefixes, *range(n)) for n in (7, 3, 5)}
    for length in range(1, 10):
        found = prefixes.find(np.arange(length, dtype=np.int32))
        longest = max((n for n in kept if n <= length), default=0)
        assert found.ready is (kept[longest] if longest else None)
        assert (found.length, found.shared) == (longest, min(length, 7))
    other = prefixes.find(ids(0, 1, 2, 3, 9, 5))
    assert other.ready is kept[3] and other.shared == 4
    assert prefixes.find(ids(4, 1)) == (None, None, 0)


def test_every_state_is_found_by_its_own_tokens_and_no_others() -> None:
    """Against all the prefixes in a list, with few tokens, so that they share much."""
    rng = np.random.default_rng(0)
    prefixes = Prefixes(range(40))
    kept: dict[bytes, Prefix] = {}
    for _ in range(400):
        tokens = rng.integers(0, 2, rng.integers(1, 9)).astype(np.int32)
        beginnings = (tokens[:n].tobytes() for n in range(len(tokens), 0, -1))
        found = prefixes.find(tokens)
        assert found.ready is next((kept[one] for one in beginnings if one in kept), None)
        if found.length < len(tokens):
            prefix = keep(prefixes, *tokens.tolist())
            kept = {name: one for name, one in kept.items() if one.is_ready}
            kept[tokens.tobytes()] = prefix
    assert prefixes.num_used == len(kept) == len({prefix.slot for prefix in kept.values()}) == 40
    assert prefixes.num_evictions > 100


def test_the_least_recently_used_is_given_up_first() -> None:
    prefixes = Prefixes(range(3))
    first, second, third = (keep(prefixes, token) for token in range(3))
    prefixes.pin(first)
    prefixes.release(first)
    slot = second.slot
    assert keep(prefixes, 7).slot == slot
    assert prefixes.find(ids(1)).ready is None
    assert prefixes.find(ids(0)).ready is first
    assert prefixes.find(ids(2)).ready is third
    assert prefixes.num_evictions == 1


def test_what_is_pinned_is_never_given_up() -> None:
    prefixes = Prefixes(range(2))
    prefix = keep(prefixes, 1)
    prefixes.pin(prefix)
    assert prefixes.claim(ids(2), ORDER) is not None
    assert prefixes.num_available == 0
    assert prefixes.claim(ids(3), ORDER) is None
    assert prefixes.find(ids(1)).ready is prefix
    prefixes.release(prefix)
    assert prefixes.claim(ids(3), ORDER) is not None
    with pytest.raises(AssertionError, match="more often"):
        prefixes.release(prefix)


def test_a_state_being_made_is_told_from_one_that_is_there() -> None:
    prefixes = Prefixes(range(3))
    short = keep(prefixes, 1)
    long = prefixes.claim(ids(1, 2, 3), (4, 0))
    assert prefixes.find(ids(1, 2, 3, 4)) == (short, long, 3)
    assert prefixes.find(ids(1, 2)) == (short, None, 2)
    assert long is not None
    prefixes.finish(long)
    assert prefixes.find(ids(1, 2, 3, 4)) == (long, None, 3)


def test_a_state_that_was_never_made_is_forgotten() -> None:
    prefixes = Prefixes(range(3))
    prefix = prefixes.claim(ids(1, 2), ORDER)
    assert prefix is not None
    prefixes.release(prefix)
    assert prefixes.find(ids(1, 2)) == (None, None, 0)
    assert prefixes.num_used == 0


def test_a_second_one_of_the_same_tokens_is_not_kept() -> None:
    prefixes = Prefixes(range(3))
    first = keep(prefixes, 1, 2)
    assert keep(prefixes, 1, 2).slot != first.slot
    assert prefixes.find(ids(1, 2)).ready is first
    assert prefixes.num_used == 1


def test_nothing_is_kept_where_that_is_off() -> None:
    prefixes = Prefixes(range(3), keep=False)
    keep(prefixes, 1, 2)
    assert prefixes.find(ids(1, 2)) == (None, None, 0)
    assert prefixes.num_used == 0


def test_what_is_forgotten_is_not_found_and_what_is_pinned_lasts_till_released() -> None:
    prefixes = Prefixes(range(4))
    for tokens in ((1,), (1, 2, 3), (1, 2, 4)):
        keep(prefixes, *tokens)
    pinned = prefixes.find(ids(1, 2, 3)).ready
    assert pinned is not None
    prefixes.pin(pinned)
    coming = prefixes.claim(ids(1, 9), ORDER)
    assert coming is not None
    prefixes.forget()
    assert (prefixes.num_used, prefixes.num_pinned) == (2, 2)
    prefixes.finish(coming)
    assert prefixes.find(ids(1, 2, 3)) == prefixes.find(ids(1, 9)) == (None, None, 0)
    keep(prefixes, 1, 2, 3)
    prefixes.release(pinned)
    prefixes.release(coming)
    assert prefixes.num_used == 1
    assert prefixes.find(ids(1, 2, 3)).length == 3
