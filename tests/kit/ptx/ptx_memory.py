"""Global and shared memory as PTX addresses it, and who touched the latter since a barrier."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tests.kit.ptx.ptx_text import PTXError

Array = npt.NDArray[Any]

STRIDE = 40  # bits of an address inside a global array
WARP = 32
SECTOR = 32  # bytes that global memory gives and takes at once


class Memory:
    """Arrays at addresses of their own, and a block's shared bytes."""

    def __init__(self, arrays: list[Array], shared_bytes: int, shared_start: int = 0) -> None:
        self._arrays = [array.reshape(-1).view(np.uint8) for array in arrays]
        self._shared_bytes, self._shared_start = shared_bytes, shared_start
        self.moved = [0] * len(arrays)
        self.begin_block()

    def begin_block(self) -> None:
        """Shared memory is anew, and NaN."""
        self.shared = np.full(self._shared_bytes, 0xFF, np.uint8)
        self.pass_barrier()

    def pass_barrier(self) -> None:
        """What was touched before a barrier races with nothing after it."""
        self._writer = np.full(self._shared_bytes // 4, -1)
        self._reader = np.full(self._shared_bytes // 4, -1)  # -2: more than one

    def find(self, shared: bool, address: Array, size: int) -> tuple[Array, Array]:
        """Memory and offsets in it. Raises PTXError where they lie outside or are not aligned."""
        memory, place = self.shared, (address & 0xFFFFFFFF) - self._shared_start
        if not shared:
            number = address >> STRIDE
            if (number != number[0]).any() or not 1 <= number[0] <= len(self._arrays):
                raise PTXError("a global address in no array")
            memory, place = self._arrays[number[0] - 1], address & ((1 << STRIDE) - 1)
        if (place < 0).any() or (place + size > len(memory)).any() or (place % size).any():
            raise PTXError(f"an address outside of its array or not aligned: {place.tolist()}")
        return memory, place

    def count(self, threads: Array, address: Array, size: int) -> None:
        """Add what an access of `size` bytes a thread moves. Raises PTXError if not aligned."""
        if (address % size).any():
            raise PTXError(f"an access of {size} bytes that is not aligned")
        sectors = np.unique(threads // WARP << STRIDE + 8 | address // SECTOR)
        self.moved[int(address[0] >> STRIDE) - 1] += SECTOR * len(sectors)

    def words(self, threads: Array, address: Array, size: int) -> tuple[Array, Array]:
        """The words that accesses of `size` bytes touch, and whose they are."""
        count = -(-size // 4)
        return np.repeat(threads, count), (address[:, None] // 4 + np.arange(count)).ravel()

    def touch(self, threads: Array, address: Array, size: int, writes: bool) -> None:
        """Keep who touched which word of shared memory. Raises PTXError where that is a race."""
        threads, at = self.words(threads, address, size)
        writer = self._writer[at]
        if ((writer >= 0) & (writer != threads)).any():
            raise PTXError("a race: shared memory that another thread wrote")
        reader = self._reader[at]
        others = (reader != -1) & (reader != threads)
        if not writes:
            self._reader[at] = np.where(others, -2, threads)
            self._reader[at[self._reader[at] != threads]] = -2
            return
        self._writer[at] = threads
        if others.any() or (self._writer[at] != threads).any():
            raise PTXError("a race: shared memory written that another thread touched")
