"""Every slot has one owner; equal stop sets share a row."""

from __future__ import annotations

import numpy as np
import pytest

from engine.messages import Request
from engine.scheduler.accept import accept
from engine.state.fair_share import FairShares
from engine.state.prefixes import Prefix
from engine.state.sequence import SequenceGroup
from engine.state.slots import FREE, SlotTable, StopSets
from tests.conftest import MakeRequest
from tests.engines.numpy_runner import TINY


def accepted(request: Request, first_id: int) -> SequenceGroup:
    group = accept(request, TINY, first_id)
    group.share = FairShares().enter(request)
    return group


def test_slots_are_free_or_owned(make_request: MakeRequest) -> None:
    table = SlotTable(8, 64)
    group = accepted(make_request(n=5), 100)
    slots = table.take(group, 3)
    assert (table.num_free, table.num_owned) == (5, 3)
    assert len(set(slots.tolist())) == 3
    assert table.sequence_id[slots].tolist() == [100, 101, 102]
    table.free(slots)
    assert (table.num_free, table.num_owned) == (8, 0)
    assert (table.sequence_id == FREE).all()


def test_a_taken_slot_says_what_its_first_row_needs(make_request: MakeRequest) -> None:
    table = SlotTable(8, 64)
    group = accepted(make_request(prompt=[3, 4, 5], n=4, max_tokens=7, top_k=3), 0)
    group.prefix, group.started = Prefix(group.prompt[:-1], slot=60), 2
    slots = table.take(group, 2).astype(np.int64)
    assert table.sequence_id[slots].tolist() == [2, 3]
    assert table.position[slots].tolist() == [2, 2]
    assert table.first_position[slots].tolist() == [2, 2]
    assert table.first_read[slots].tolist() == [60, 60]
    assert table.first_token[slots].tolist() == [5, 5]
    assert table.last_position[slots].tolist() == [8, 8]
    assert table.top_k[slots].tolist() == [3, 3]
    assert len(set(table.seed[slots].tolist())) == 2
    table.is_running[slots] = True
    table.advance(slots, np.array([2, 2], np.int32), np.array([False, True]))
    assert table.position[slots].tolist() == [3, 3]
    assert table.is_running[slots].tolist() == [True, False]


def test_logprobs_take_memory_only_once_asked_for(make_request: MakeRequest) -> None:
    table = SlotTable(8, 64)
    quiet = table.take(accepted(make_request(), 0), 1)
    assert table.output_logprobs is None
    asking = table.take(accepted(make_request(logprobs=0), 1), 1)
    slots = np.append(quiet, asking).astype(np.int64)
    positions, tokens = np.array([2, 40], np.int32), np.array([8, 9], np.int32)
    table.record(slots, positions, tokens, np.array([-1, -2], np.float32))
    read = zip(slots.tolist(), positions.tolist(), strict=True)
    assert [table.output_tokens.read(slot, at, at + 1) for slot, at in read] == [
        token.tobytes() for token in tokens
    ]
    assert table.output_logprobs is not None
    assert table.output_logprobs.read(int(asking[0]), 40, 41) == np.float32(-2).tobytes()


def test_freeing_twice_or_taking_too_many_is_our_bug(make_request: MakeRequest) -> None:
    table = SlotTable(2, 64)
    group = accepted(make_request(n=3), 0)
    with pytest.raises(AssertionError, match="than are free"):
        table.take(group, 3)
    slots = table.take(group, 1)
    table.free(slots)
    with pytest.raises(AssertionError, match="twice"):
        table.free(slots)


def test_equal_stop_sets_share_a_row() -> None:
    sets = StopSets(32)
    small, large = frozenset({1}), frozenset(range(31))
    row = sets.acquire(small)
    assert sets.acquire(frozenset({1})) == row
    other = sets.acquire(large)
    assert other != row
    assert np.flatnonzero(sets.table[row]).tolist() == [1]
    assert np.flatnonzero(sets.table[other]).tolist() == list(range(31))


def test_a_row_is_used_again_after_its_last_user() -> None:
    sets = StopSets(32)
    row = sets.acquire(frozenset({1, 2}))
    sets.acquire(frozenset({1, 2}))
    sets.release(frozenset({1, 2}))
    assert sets.acquire(frozenset({3})) != row
    sets.release(frozenset({1, 2}))
    assert sets.acquire(frozenset()) == row
    assert not sets.table[row].any()
    assert np.flatnonzero(sets.may_end).tolist() == [3, 32]  # 32: what -1 selects


def test_the_stop_table_grows_with_its_sets() -> None:
    sets = StopSets(32)
    rows = {token: sets.acquire(frozenset({token})) for token in range(20)}
    assert len(set(rows.values())) == 20
    for token, row in rows.items():
        assert np.flatnonzero(sets.table[row]).tolist() == [token]
    for token in range(20):
        sets.release(frozenset({token}))
    for token in range(32):
        sets.acquire(frozenset({token}))
    assert len(sets.table) == 32
