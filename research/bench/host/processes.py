"""Processor time and memory of processes, from /proc, once or during a benchmark."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_PERIOD_S = 0.5
_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICK = os.sysconf("SC_CLK_TCK")
_PROC = Path("/proc")


class Process(NamedTuple):
    """One process of the process table."""

    parent: int
    cpu_s: float
    """CPU time of the process and of its children that have ended."""
    rss_bytes: int


class ProcessSample(NamedTuple):
    """One sample of the machine's processes."""

    time: float
    """Seconds on the monotonic clock."""
    busy_s: float
    """CPU time that the whole machine has used since boot."""
    own_s: float
    """The part of it used by this process and its descendants."""
    rss_bytes: int
    """Memory of the watched process and its descendants; shared pages count for each."""


class Watch:
    """Samples twice a second while the `with` block runs."""

    def __init__(self) -> None:
        self.samples: list[ProcessSample] = []
        self.pid = 0
        """The process whose memory is summed up, with its descendants; 0: none."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def peak_rss(self, began: float, ended: float) -> int:
        """Return the peak memory in that time, in bytes; 0 if there is no sample."""
        return max(
            (sample.rss_bytes for sample in self.samples if began <= sample.time <= ended),
            default=0,
        )

    def foreign_cpus(self, began: float, ended: float) -> float | None:
        """Return the cores used by other processes meanwhile; None: too short to measure."""
        within = [sample for sample in self.samples if began <= sample.time <= ended]
        if len(within) < 2:
            return None
        first, last = within[0], within[-1]
        foreign = (last.busy_s - first.busy_s) - (last.own_s - first.own_s)
        return max(0.0, foreign) / (last.time - first.time)

    def _look(self) -> None:
        while not self._stop.wait(_PERIOD_S):
            table, busy = processes(), busy_s()
            own = sum(table[pid].cpu_s for pid in below(os.getpid(), table))
            rss_bytes = sum(table[pid].rss_bytes for pid in below(self.pid, table))
            self.samples.append(ProcessSample(time.monotonic(), busy, own, rss_bytes))


def processes() -> dict[int, Process]:
    """Return all processes by id."""
    pids = {}
    for entry in _PROC.iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):  # it has ended
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                cpu_s = sum(map(int, fields[11:15])) / _TICK
                pids[int(entry.name)] = Process(int(fields[1]), cpu_s, int(fields[21]) * _PAGE)
    return pids


def below(pid: int, table: dict[int, Process]) -> set[int]:
    """Return a process and its descendants, as far as they are in the table."""
    pids = {pid} & table.keys()
    while more := {key for key, process in table.items() if process.parent in pids} - pids:
        pids |= more
    return pids


def busy_s() -> float:
    """Return the CPU time that the whole machine has used since boot."""
    user, nice, system, _idle, _waiting, *others = map(
        int, (_PROC / "stat").read_text().split("\n", 1)[0].split()[1:9]
    )
    return (user + nice + system + sum(others)) / _TICK
