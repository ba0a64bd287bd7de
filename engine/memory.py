"""Measures the memory this machine has left, and sets how often Python collects garbage."""

from __future__ import annotations

import gc
import os
from pathlib import Path

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")  # where a container's own memory limit is


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
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
        used = int((CGROUP / "memory.current").read_text())
    except (OSError, ValueError):
        limit, used = "max", 0
    return int(limit) - used if limit != "max" else 2**63


def collect_rarely() -> None:
    """Let Python look for cycles of objects rarely, and never among those that are there now.

    By default it looks at all objects whenever their number has grown by a quarter: with ten
    thousands of requests waiting, that takes longer than serving them. They are in no cycle.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(250_000, 10, 50)
