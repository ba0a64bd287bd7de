"""Counts the processor cores that this process may use."""

from __future__ import annotations

import os
from pathlib import Path

CPU_MAX = Path("/sys/fs/cgroup/cpu.max")  # where a container's own limit of time is


def available_cores() -> int:
    """Return how many there are, at least 1, within a container's limit."""
    has_affinity = hasattr(os, "sched_getaffinity")  # not on macOS
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    try:
        quota, period = CPU_MAX.read_text().split()
        return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):  # no container, or "max"
        return cores
