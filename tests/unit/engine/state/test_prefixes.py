"""Which prefixes are found, kept and given up."""

from __future__ import annotations

import numpy as np
import pytest

from srm.engine.state.prefixes import Prefix, Prefixes
from srm.engine.steps.batch import I32

ORDER = (0, 0, 0)


def ids(*tokens: int) -> I32:
    return np.array(tokens, np.int32)


def claim(prefixes: Prefixes, *tokens: int) -> Prefix:
    prefix = prefixes.claim(ids(*tokens), ORDER)
    assert prefix is not None
    return prefix


def keep(prefixes: Prefixes, *tokens: int) -> Prefix:
    """Make the state after these tokens, and let go of it."""
    prefix = claim(prefixes, *tokens)
    prefixes.finish(prefix)
    prefixes.release(prefix)
    return prefix


def test_every_state_is_found_by_its_own_tokens_and_no_others() -> None:
    """Against all the prefixes in a list, with few tokens, so that they share much."""
    rng = np.random.default_rng(0)
    prefixes = Prefixes(range(40))
    entries: dict[bytes, Prefix] = {}
    for _ in range(400):
        tokens = rng.integers(0, 2, rng.integers(1, 9)).astype(np.int32)
        beginnings = [tokens[:n].tobytes() for n in range(len(tokens), 0, -1)]
        result = prefixes.find(tokens)
        assert result.ready is next(
            (entries[beginning] for beginning in beginnings if beginning in entries), None
        )
        shares = (
            beginning
            for beginning in beginnings
            if any(name.startswith(beginning) for name in entries)
        )
        assert result.shared == len(next(shares, b"")) // 4
        if result.length < len(tokens):
            prefix = keep(prefixes, *tokens.tolist())
            entries = {name: entry for name, entry in entries.items() if entry.is_ready}
            entries[tokens.tobytes()] = prefix
    assert (
        prefixes.num_used == len(entries) == len({prefix.slot for prefix in entries.values()}) == 40
    )
    assert prefixes.num_evictions > 100


def test_the_least_recently_used_is_given_up_first_and_never_what_is_pinned() -> None:
    prefixes = Prefixes(range(3))
    first, second, third = (keep(prefixes, token) for token in range(3))
    prefixes.pin(first)
    prefixes.release(first)
    slot = second.slot
    assert keep(prefixes, 7).slot == slot
    assert [prefixes.find(ids(token)).ready for token in range(3)] == [first, None, third]
    assert prefixes.num_evictions == 1
    for prefix in (first, third):
        prefixes.pin(prefix)
    claim(prefixes, 8)
    assert (prefixes.num_available, prefixes.claim(ids(9), ORDER)) == (0, None)
    assert prefixes.find(ids(0)).ready is first
    prefixes.release(first)
    claim(prefixes, 9)
    with pytest.raises(AssertionError, match="more often"):
        prefixes.release(first)


def test_a_state_being_made_is_told_from_one_that_is_there_or_never_was() -> None:
    prefixes = Prefixes(range(3))
    short, long = keep(prefixes, 1), claim(prefixes, 1, 2, 3)
    assert prefixes.find(ids(1, 2, 3, 4)) == (short, long, 3)
    assert prefixes.find(ids(1, 2)) == (short, None, 2)
    prefixes.finish(long)
    assert prefixes.find(ids(1, 2, 3, 4)) == (long, None, 3)
    prefixes.release(claim(prefixes, 4, 5))  # never made
    assert prefixes.find(ids(4, 5)) == (None, None, 0)
    assert keep(prefixes, 1).slot != short.slot  # a second one is not kept
    assert (prefixes.find(ids(1)).ready, prefixes.num_used) == (short, 2)
    off = Prefixes(range(3), keep=False)
    keep(off, 1, 2)
    assert (off.find(ids(1, 2)), off.num_used) == ((None, None, 0), 0)


def test_what_is_forgotten_is_not_found_and_what_is_pinned_lasts_till_released() -> None:
    prefixes = Prefixes(range(4))
    for tokens in ((1,), (1, 2, 3), (1, 2, 4)):
        keep(prefixes, *tokens)
    pinned = prefixes.find(ids(1, 2, 3)).ready
    assert pinned is not None
    prefixes.pin(pinned)
    coming = claim(prefixes, 1, 9)
    prefixes.forget()
    assert (prefixes.num_used, prefixes.num_pinned) == (2, 2)
    prefixes.finish(coming)
    assert prefixes.find(ids(1, 2, 3)) == prefixes.find(ids(1, 9)) == (None, None, 0)
    keep(prefixes, 1, 2, 3)
    prefixes.release(pinned)
    prefixes.release(coming)
    assert (prefixes.num_used, prefixes.find(ids(1, 2, 3)).length) == (1, 3)
