"""Rows of a numpy record type, appended by the million: packed bytes, no object per row."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Rows:
    """Rows such as those of `recording.REQUEST`; values come in the order of the type's fields."""

    def __init__(self, dtype: np.dtype[np.void]) -> None:
        codes = [dtype[name].char for name in dtype.names or ()]
        layout = struct.Struct("<" + "".join("q" if code == "l" else code for code in codes))
        assert layout.size == dtype.itemsize, "rows are packed, and so must the type be"
        self._dtype = dtype
        self._pack = layout.pack
        self._bytes = bytearray()

    def append(self, *values: Any) -> None:
        self._bytes += self._pack(*values)

    def __len__(self) -> int:
        return len(self._bytes) // self._dtype.itemsize

    def to_bytes(self) -> bytes:
        return bytes(self._bytes)

    def since(self, count: int) -> NDArray[np.void]:
        """Return a copy of the rows after the first `count`."""
        return np.frombuffer(bytes(self._bytes[count * self._dtype.itemsize :]), self._dtype)

    def array(self) -> NDArray[np.void]:
        """Return a copy of all rows."""
        return np.frombuffer(self.to_bytes(), self._dtype).copy()
