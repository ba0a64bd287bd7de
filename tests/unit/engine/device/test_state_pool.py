"""How many slots there are: as many as fit, unless someone said."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import cast

import msgspec
import numpy as np
import pytest
from max.driver import CPU
from max.engine import CompiledModel, InferenceSession

from srm.engine.config import EngineConfig, ModelConfig
from srm.engine.device.graph_cache import GraphCache
from srm.engine.device.slot_copies import SlotCopies
from srm.engine.device.state_pool import StatePool
from srm.engine.state.slot_counts import slot_bytes
from srm.engine.state.slots import SlotTable
from srm.engine.steps.batch import Batch, SlotStates
from tests.kit.engines.numpy_runner import TINY


def test_a_slot_takes_what_its_arrays_take() -> None:
    pool = StatePool(TINY, 100, CPU())
    *arrays, tables = (buffer.to_numpy() for buffer in pool.inputs(with_tables()))
    assert sum(array.nbytes for array in arrays) == 100 * slot_bytes(TINY) and len(tables) == 1
    table = SlotTable(100, TINY.n_ctx)
    results = [array for array in vars(table).values() if isinstance(array, np.ndarray)]
    assert table.nbytes == sum(array.nbytes for array in results) + 4 * 100 * TINY.n_ctx
    assert table.nbytes == 100 * SlotTable(1, TINY.n_ctx).nbytes


def with_tables(*tables: tuple[int, list[int]]) -> Batch:
    own = [(start, np.array(entries, np.uint16)) for start, entries in tables]
    return cast(Batch, SimpleNamespace(tables=own, has_tables=bool(tables)))


def test_tables_are_there_from_the_step_that_brings_them_on() -> None:
    pool = StatePool(TINY, 1, CPU())
    assert pool.inputs(with_tables())[3].shape == (1,)
    pool.inputs(with_tables((2, [5, 6, 7]), (9, [8])))
    tables = pool.inputs(with_tables((3, [4])))[3].to_numpy()
    assert tables[:10].tolist() == [0, 0, 5, 4, 7, 0, 0, 0, 0, 8]


@cache
def slot_graphs() -> tuple[InferenceSession, CompiledModel]:
    """Those that a GPU has, for a CPU."""
    session = InferenceSession(devices=[CPU()])
    folder = EngineConfig().cache_dir.expanduser()
    return session, GraphCache(session, CPU(), folder).slots()


def copies(model: ModelConfig, slots_at_once: int) -> SlotCopies:
    width = model.state_width
    return SlotCopies(*slot_graphs(), width, CPU(), staged_bytes=slots_at_once * 4 * (width + 1))


@pytest.mark.parametrize("slots_at_once", [None, 2, 5, 100])
def test_slots_are_read_and_written_in_any_order(slots_at_once: int | None) -> None:
    """As a processor does, and by the kernel that a GPU packs them with."""
    how = copies(TINY, slots_at_once) if slots_at_once else None
    pool, rng = StatePool(TINY, 10, CPU(), how), np.random.default_rng(0)
    written = SlotStates(
        rng.random((5, TINY.state_width), np.float32), np.arange(5, dtype=np.int32)
    )
    slots = np.array([7, 8, 9, 1, 4])
    pool.write(slots, written)
    order = np.array([4, 3, 0, 2, 1])
    content = pool.read(slots[order])
    np.testing.assert_array_equal(content.states, written.states[order])
    np.testing.assert_array_equal(content.last_tokens, order)
    others = pool.read(np.array([0, 2, 3, 5, 6]))
    assert not others.states.any()
    assert not others.last_tokens.any()
    assert len(pool.read(np.empty(0, np.int64))) == 0


@pytest.mark.parametrize("slots_at_once", [None, 64])
def test_what_is_written_may_be_freed_at_once(slots_at_once: int | None) -> None:
    model = msgspec.structs.replace(TINY, d_model=1024)  # enough that a copy would take its time
    how = copies(model, slots_at_once) if slots_at_once else None
    pool, rng = StatePool(model, 1_100, CPU(), how), np.random.default_rng(0)
    expected = rng.random((1_000, model.state_width), np.float32)
    for begin in range(5):
        slots = np.arange(begin, begin + 1_000)
        states = SlotStates(expected.copy(), np.arange(1_000, dtype=np.int32))
        pool.write(slots, states)
        states.states[:], states.last_tokens[:] = -1, -1
        del states
        content = pool.read(slots)
        np.testing.assert_array_equal(content.states, expected)
        np.testing.assert_array_equal(content.last_tokens, np.arange(1_000))
