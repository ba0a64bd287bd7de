"""History: one value per slot and context position, of which only what is written takes memory.

A step writes one value for each of its rows, at whatever position each is. So the values of a slot
do not lie in one row, which would be a cache line and a page of its own for every write; they lie
in blocks of one cache line, `[block of positions][slot][position in the block]`. Neighbouring slots
share pages, and short sequences leave the blocks of long ones untouched. Knows no owners.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from engine.steps.batch import F32, I32, I64

BLOCK = 16  # positions in a block: a cache line of 4-byte values


class History:
    """4-byte values by (slot, position)."""

    def __init__(self, num_slots: int, n_ctx: int, dtype: type[np.int32 | np.float32]) -> None:
        self._num_slots = num_slots
        num_blocks = -(-n_ctx // BLOCK)
        # The operating system maps what was never written to nothing.
        self._blocks: npt.NDArray[np.int32 | np.float32] = np.empty(
            (num_blocks, num_slots, BLOCK), dtype
        )

    @property
    def nbytes(self) -> int:
        """Bytes taken once everything was written."""
        return self._blocks.nbytes

    def put(self, slots: I64, positions: I32 | I64, values: I32 | F32) -> None:
        """Store one value for each slot."""
        blocks, places = positions.astype(np.int64) // BLOCK, positions % BLOCK
        index = (blocks * self._num_slots + slots) * BLOCK + places
        self._blocks.reshape(-1)[index] = values

    def read(self, slot: int, start: int, stop: int) -> bytes:
        """A slot's values at positions start … stop - 1."""
        first = start // BLOCK
        found = self._blocks[first : -(-stop // BLOCK), slot].tobytes()
        return found[4 * (start - first * BLOCK) : 4 * (stop - first * BLOCK)]
