"""Measures the memory this machine has left, sets how often Python collects garbage, and copies to
huge pages."""

from __future__ import annotations

import gc
import mmap
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from srm.engine.cores import CGROUP

MEMINFO = Path("/proc/meminfo")
HUGE_PAGE = 2**21
_MAPPED_AT_ONCE = 2**25
"""Bytes; pages to which nothing is copied take no memory."""
_CACHE_LINE = 64

Some = TypeVar("Some", bound=npt.NDArray[Any])


def available_memory() -> int:
    """Bytes that can be taken without swapping, within a container's limit; where the system does
    not say (it is not Linux), all the memory that the machine has."""
    try:
        lines = MEMINFO.read_text().splitlines()
        (kib,) = (int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(0, min(1024 * kib, _left_in_cgroup()))


def _left_in_cgroup() -> int:
    """Return the bytes that a container may still take, by cgroup v2 or v1; without a limit more
    than there are."""
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            return int((CGROUP / limit).read_text()) - int((CGROUP / used).read_text())
        except (OSError, ValueError):  # no container of this version, or "max"
            continue
    return 2**63


def collect_rarely() -> None:
    """Let Python look for cycles of objects rarely, and never among those that are there now.

    By default it looks at all objects whenever their number has grown by a quarter: with ten
    thousands of requests waiting, that takes longer than serving them. They are in no cycle.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(250_000, 10, 50)


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
