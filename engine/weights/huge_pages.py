"""Copies arrays to huge pages of memory."""

from __future__ import annotations

import mmap
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

HUGE_PAGE = 2**21
_MAPPED_AT_ONCE = 2**25
"""Bytes; pages to which nothing is copied take no memory."""
_CACHE_LINE = 64

Some = TypeVar("Some", bound=npt.NDArray[Any])


class HugePages:
    """Memory for arrays that every step reads from end to end: a processor looks up the places of
    its pages less often. Pages are ordinary ones where the system has no others."""

    def __init__(self) -> None:
        self._left = np.empty(0, np.uint8)

    def copy(self, array: Some) -> Some:
        """Return a copy, of the same shape and dtype. Its memory is given back when neither this
        nor another copy beside it is left."""
        size = -(-array.nbytes // _CACHE_LINE) * _CACHE_LINE
        if size > len(self._left):
            self._left = _huge_pages(max(size, _MAPPED_AT_ONCE))
        place, self._left = self._left[: array.nbytes], self._left[size:]
        copied = place.view(array.dtype).reshape(array.shape)
        copied[...] = array
        return copied  # type: ignore[return-value]  # of the same kind


def _huge_pages(size: int) -> npt.NDArray[np.uint8]:
    mapped = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):  # the system has none
        mapped.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(mapped, np.uint8)
    start = -whole.ctypes.data % HUGE_PAGE
    return whole[start : start + size]
