"""The processor cores that this process may use: how many, and those near a GPU."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from math import inf
from pathlib import Path

log = logging.getLogger(__name__)

SYSFS = Path("/sys")
CGROUP = Path("/sys/fs/cgroup")  # where a container's own limits are


def available_cores() -> int:
    """Return how many there are, at least 1, within a container's limit."""
    has_affinity = hasattr(os, "sched_getaffinity")  # not on macOS
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return max(1, int(min(cores, _quota())))


def stay_near(address: str) -> None:
    """Have all threads of this process, and those that they start, run on cores of the NUMA node of
    the GPU with this PCI address, such as 0000:45:00.0. Does nothing on a machine of one node."""
    device = SYSFS / "bus" / "pci" / "devices" / address.lower()
    try:
        if len(_numbers(SYSFS / "devices" / "system" / "node" / "online")) < 2:
            return
        node = int((device / "numa_node").read_text())
        near = _numbers(device / "local_cpulist") if node >= 0 else set()
        if not (cores := near & os.sched_getaffinity(0)):
            log.warning("GPU %s is at NUMA node %d: this process has no cores there", address, node)
            return
        for thread in Path("/proc/self/task").iterdir():
            with suppress(ProcessLookupError):  # it has ended
                os.sched_setaffinity(int(thread.name), cores)
    except (OSError, ValueError) as error:
        log.warning("GPU %s: this process stays on all of its cores (%s)", address, error)
        return
    log.info("GPU %s is at NUMA node %d: cores %s", address, node, sorted(cores))


def _numbers(file: Path) -> set[int]:
    """Read a list of the kernel's, such as 0-3,8."""
    ranges = (part.split("-") for part in file.read_text().split(",") if part.strip())
    return {number for ends in ranges for number in range(int(ends[0]), int(ends[-1]) + 1)}


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
