"""Measures memory, bounds what is kept in it, shares texts in it between processes, and sets how
often Python collects garbage."""

from __future__ import annotations

import gc
import os
from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import cache
from pathlib import Path
from typing import Generic, TypeVar

from srm.cores import CGROUP

MEMINFO = Path("/proc/meminfo")
_PAGE = os.sysconf("SC_PAGE_SIZE")

MAX_TEXT = 4096
"""Most bytes of a text that processes share."""
CACHE_ENTRY = 1024
"""Bytes that count for an entry of a Cache beside its key and value: those of Python's objects."""

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


def write_text(fd: int, text: str) -> None:
    """Have a file in memory hold this text, for `read_text` in another process."""
    os.ftruncate(fd, 0)
    os.pwrite(fd, text.encode()[:MAX_TEXT], 0)


def read_text(fd: int) -> str:
    """Return the text that a file in memory holds; -1 stands for one that holds none."""
    return os.pread(fd, MAX_TEXT, 0).decode(errors="replace") if fd >= 0 else ""


class Cache(Generic[Key, Value]):
    """Values that can be made again, of at most so many bytes: those used longest ago make room.
    For one thread."""

    def __init__(self, max_bytes: int, show: Callable[[float], object] = lambda _: None) -> None:
        """`show` is given the bytes that it holds, whenever they change."""
        self._max_bytes, self._show = max_bytes, show
        self._values: OrderedDict[Key, tuple[Value, int]] = OrderedDict()
        self.nbytes = 0

    def get(self, key: Key) -> Value | None:
        """Return the value, which counts as used last; None if there is none."""
        if key not in self._values:
            return None
        self._values.move_to_end(key)
        return self._values[key][0]

    def put(self, key: Key, value: Value, nbytes: int) -> None:
        """Keep a value, unless it alone takes too many bytes. `nbytes`: of it and its key."""
        self.nbytes += nbytes + CACHE_ENTRY - self._values.pop(key, (None, 0))[1]
        self._values[key] = value, nbytes + CACHE_ENTRY
        while self.nbytes > self._max_bytes:
            _, (_, dropped) = self._values.popitem(last=False)
            self.nbytes -= dropped
        self._show(self.nbytes)


def resident_bytes() -> int:
    """Bytes of memory that this process holds; 0 where the system does not say."""
    try:
        return int(os.pread(_statm(os.getpid()), 256, 0).split()[1]) * _PAGE
    except (OSError, ValueError, IndexError):
        return 0


@cache
def _statm(_process: int) -> int:
    return os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)


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
