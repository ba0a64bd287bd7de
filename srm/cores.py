"""Counts the processor cores that this process may use."""

from __future__ import annotations

import os
from math import inf
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")  # where a container's own limits are


def available_cores() -> int:
    """Return how many there are, at least 1, within a container's limit."""
    has_affinity = hasattr(os, "sched_getaffinity")  # not on macOS
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return max(1, int(min(cores, _quota())))


def _quota() -> float:
    """Return how many cores' time a container may take, by cgroup v2 or v1; inf without a limit."""
    for names in (["cpu.max"], ["cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"]):
        try:
            quota, period = " ".join((CGROUP / name).read_text() for name in names).split()
            if int(quota) > 0:
                return int(quota) / int(period)
        except (OSError, ValueError, ZeroDivisionError):  # no container of this version, or "max"
            continue
    return inf
