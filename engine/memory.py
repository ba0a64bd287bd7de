"""How much memory this machine has left, and what a process of many steps does with its own.

What is said here about a process is said once, by the program that it runs.
"""

from __future__ import annotations

import ctypes
import gc
import os
from pathlib import Path

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
"""Of a container, its own limit."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_KEPT = 2**30  # bytes at the end of the heap that stay
_LARGE = 2**25  # bytes from which an array has pages of its own; glibc takes no more


def available_memory() -> int:
    """Bytes that can be taken without swapping, within a container's limit.

    Where the system does not say (it is not Linux), all the memory that the machine has.
    """
    try:
        lines = MEMINFO.read_text().splitlines()
        (kib,) = (int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(0, min(1024 * kib, _left_in_cgroup()))


def _left_in_cgroup() -> int:
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
        used = int((CGROUP / "memory.current").read_text())
    except (OSError, ValueError):
        limit, used = "max", 0
    return int(limit) - used if limit != "max" else 2**63


def keep_freed_memory() -> None:
    """Let this process keep memory that is freed, for the arrays of the next step.

    They are megabytes at many thousand rows. By default the C library gives such memory back and
    takes it again a step later, and the system maps and clears every page anew: half of the host's
    time. Other C libraries than glibc are left as they are.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_M_TRIM_THRESHOLD, _KEPT)
        library.mallopt(_M_MMAP_THRESHOLD, _LARGE)


def collect_rarely() -> None:
    """Let Python look for cycles of objects rarely, and never among those that are there now.

    By default it looks at all objects whenever their number has grown by a quarter: with ten
    thousands of requests waiting, that takes longer than serving them. They are in no cycle.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
