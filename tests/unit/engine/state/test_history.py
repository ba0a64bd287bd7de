"""A history gives back what was put, wherever it was, and takes memory only for that."""

from __future__ import annotations

import numpy as np

from engine.state.slots import BLOCK, History


def test_what_was_put_is_read_across_blocks() -> None:
    rng = np.random.default_rng(0)
    num_slots, n_ctx = 9, 3 * BLOCK + 5
    history, expected = History(num_slots, n_ctx, np.int32), np.empty((num_slots, n_ctx), np.int32)
    for _ in range(4 * n_ctx):
        slots = rng.permutation(num_slots)[: rng.integers(1, num_slots + 1)]
        positions = rng.integers(0, n_ctx, len(slots), np.int32)
        values = rng.integers(0, 2**31, len(slots), np.int32)
        history.put(slots, positions, values)
        expected[slots, positions] = values
    history.put(np.arange(9), np.full(9, n_ctx - 1, np.int32), expected[:, n_ctx - 1])
    written = np.arange(n_ctx, dtype=np.int32)
    history.put(np.full(n_ctx, 4), written, written)
    for start, stop in ((0, n_ctx), (0, 0), (3, 3), (BLOCK, BLOCK), (15, 17), (16, 32), (7, 40)):
        assert np.frombuffer(history.read(4, start, stop), "<i4").tolist() == [*range(start, stop)]
    last = np.frombuffer(history.read(8, n_ctx - 1, n_ctx), "<i4")
    assert last.tolist() == [expected[8, n_ctx - 1]]


def test_offsets_are_64_bit() -> None:
    num_slots = 2**26 + 2
    history = History(num_slots, 2 * BLOCK, np.float32)
    assert history.nbytes > 4 * 2**31
    slots = np.array([0, num_slots - 1, 0, num_slots - 1])
    positions = np.array([0, 0, 2 * BLOCK - 1, 2 * BLOCK - 1], np.int32)
    values = np.arange(4, dtype=np.float32)
    history.put(slots, positions, values)
    for slot, position, value in zip(slots.tolist(), positions.tolist(), values, strict=True):
        assert history.read(slot, position, position + 1) == value.tobytes()
