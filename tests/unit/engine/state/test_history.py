"""A history gives back what was put, wherever it was, and takes memory only for that."""

from __future__ import annotations

import numpy as np

from srm.engine.state.slots import BLOCK, History


def test_what_was_put_is_read_across_blocks() -> None:
    rng, n_ctx = np.random.default_rng(0), 3 * BLOCK + 5
    history, expected = History(9, n_ctx, np.int32), rng.integers(0, 2**31, (9, n_ctx), np.int32)
    for some in np.array_split(rng.permutation(expected.size), 40):
        slots, positions = np.divmod(some, n_ctx)
        history.put(slots, positions.astype(np.int32), expected[slots, positions])
    for start, stop in ((0, n_ctx), (0, 0), (3, 3), (BLOCK, BLOCK), (15, 17), (16, 32), (7, 40)):
        for slot in range(9):
            assert history.read(slot, start, stop) == expected[slot, start:stop].tobytes()


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
