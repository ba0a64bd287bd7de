"""Every slot has one owner; equal stop sets share a row; a sample's random stream is its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from srm.engine.random_streams import sample_seeds
from srm.engine.scheduler.accept import accept
from srm.engine.state.fair_share import FairShares
from srm.engine.state.sequence import SequenceGroup
from srm.engine.state.slots import BLOCK, History, SlotTable, StopSets
from tests.kit.engines.making import request_of
from tests.kit.engines.numpy_runner import TINY


def accepted(first_id: int = 0, **settings: Any) -> SequenceGroup:
    group = accept(request_of(**settings), TINY, first_id)
    group.share = FairShares().enter(group.request)
    return group


def test_no_slot_is_taken_or_freed_twice() -> None:
    table = SlotTable(8, 64)
    slots = table.assign_slots(accepted(n=9), 3)
    with pytest.raises(AssertionError, match="than are free"):
        table.assign_slots(accepted(n=9), 6)
    table.free(slots)
    with pytest.raises(AssertionError, match="twice"):
        table.free(slots)


def test_a_slot_belongs_to_the_share_of_its_sequence() -> None:
    table, shares, results = SlotTable(1, 64), FairShares(), []
    for name in ("", "a", "b", ""):
        group = accepted(share=name)
        group.share = shares.enter(group.request)
        slots = table.assign_slots(group, 1)
        results.append((int(table.share[slots[0]]), group.share.place))
        table.free(slots)
    assert [place for place, _ in results] == [place for _, place in results]
    assert len(set(results)) == 3


def test_logprobs_take_memory_only_once_asked_for() -> None:
    table = SlotTable(8, 64)
    quiet = table.assign_slots(accepted(), 1)
    assert table.output_logprobs is None
    asking = table.assign_slots(accepted(1, logprobs=0), 1)
    assert table.output_logprobs is not None
    slots, positions = np.append(quiet, asking).astype(np.int64), np.array([2, 40], np.int32)
    table.record(slots, positions, np.array([8, 9], np.int32), np.array([-1, -2], np.float32))
    rows = list(zip(slots.tolist(), positions.tolist(), (positions + 1).tolist(), strict=True))
    assert [table.output_tokens.read(*row) for row in rows] == [b"\x08\0\0\0", b"\x09\0\0\0"]
    assert table.output_logprobs.read(*rows[1]) == np.float32(-2).tobytes()


def test_equal_stop_sets_share_a_row_until_their_last_user() -> None:
    sets = StopSets(32)
    pair, large = frozenset({1, 2}), frozenset(range(31))
    row = sets.acquire(pair)
    assert sets.acquire(frozenset({2, 1})) == row
    other = sets.acquire(large)
    assert other != row
    assert np.flatnonzero(sets.table[row]).tolist() == [1, 2]
    assert np.flatnonzero(sets.table[other]).tolist() == list(range(31))
    sets.release(large)
    sets.release(pair)
    assert sets.acquire(frozenset({3})) != row
    sets.release(pair)
    assert sets.acquire(frozenset()) == row
    assert not sets.table[row].any()
    assert np.flatnonzero(sets.may_end).tolist() == [3, 32]  # 32: what -1 selects


def test_the_stop_table_grows_with_its_sets() -> None:
    sets = StopSets(32)
    rows = {token: sets.acquire(frozenset({token})) for token in range(20)}
    assert len(set(rows.values())) == 20
    for token, row in rows.items():
        assert np.flatnonzero(sets.table[row]).tolist() == [token]
        sets.release(frozenset({token}))
    for token in range(32):
        sets.acquire(frozenset({token}))
    assert len(sets.table) == 32


def test_seeds_are_those_of_splitmix64_whoever_starts_with_them() -> None:
    first = sample_seeds(1234567, np.arange(3, dtype=np.int64)).tolist()
    assert first == [6457827717110365317, 3203168211198807973, 9817491932198370423]
    together = sample_seeds(2**64 - 1, np.arange(100, dtype=np.int64))
    alone = [sample_seeds(2**64 - 1, np.array([i], np.int64))[0] for i in range(100)]
    assert together.tolist() == alone
    assert len(set(alone)) == 100


def test_a_history_is_read_across_blocks() -> None:
    rng, n_ctx = np.random.default_rng(0), 3 * BLOCK + 5
    history, expected = History(9, n_ctx, np.int32), rng.integers(0, 2**31, (9, n_ctx), np.int32)
    for some in np.array_split(rng.permutation(expected.size), 40):
        slots, positions = np.divmod(some, n_ctx)
        history.put(slots, positions.astype(np.int32), expected[slots, positions])
    for start, stop in ((0, n_ctx), (0, 0), (3, 3), (BLOCK, BLOCK), (15, 17), (16, 32), (7, 40)):
        for slot in range(9):
            assert history.read(slot, start, stop) == expected[slot, start:stop].tobytes()


def test_offsets_of_a_history_are_64_bit() -> None:
    num_slots = 2**26 + 2
    history = History(num_slots, 2 * BLOCK, np.float32)
    assert history.nbytes > 4 * 2**31
    slots = np.array([0, num_slots - 1, 0, num_slots - 1])
    positions = np.array([0, 0, 2 * BLOCK - 1, 2 * BLOCK - 1], np.int32)
    values = np.arange(4, dtype=np.float32)
    history.put(slots, positions, values)
    for slot, position, value in zip(slots.tolist(), positions.tolist(), values, strict=True):
        assert history.read(slot, position, position + 1) == value.tobytes()
