"""Why a process may have ended: its signal by name, and what it writes to and has no room in."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

_CAUSES = {
    signal.SIGABRT: "native code gave up, as it does when memory runs out; its last lines say why",
    signal.SIGBUS: "a full disk or temp folder, or a file that was cut short while it was read",
    signal.SIGFPE: "a division by zero in native code",
    signal.SIGHUP: "sent by somebody",
    signal.SIGILL: "an instruction that this processor does not have",
    signal.SIGINT: "sent by somebody",
    signal.SIGKILL: "out of memory, as the kernel's log says then, or killed by hand",
    signal.SIGSEGV: "a fault of native code",
    signal.SIGSYS: "a system call that the container forbids",
    signal.SIGTERM: "sent by somebody",
    signal.SIGXCPU: "a limit of processor time, ulimit -t",
    signal.SIGXFSZ: "a limit of file sizes, ulimit -f",
}
"""Likely causes, by signal."""
_PASSING = {errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE}
"""What a machine has too little of at the moment, where a process cannot be started."""
_ROOM_BYTES = 2**20
"""A disk with less to give is full: some of what is written at a start is larger than the rest."""
_LOOKS, _LOOK_S = 200, 0.01
"""How often, and with what pauses, it is seen whether the disks have answered."""


def describe_exit(code: int) -> str:
    """Return an exit code for the log: a signal with its name and the likely cause."""
    if code >= 0:
        return f"exit code {code}"
    try:
        number = signal.Signals(-code)
    except ValueError:  # of real time
        return f"signal {-code}"
    cause = _CAUSES.get(number)
    return f"{number.name}: {cause}" if cause else number.name


async def passing_cause(folders: Sequence[Path], error: OSError | None = None) -> str:
    """Return what hinders whoever writes to these folders and may pass by itself; empty: nothing.

    `error` is that of a process that could not be started.
    """
    if error is not None and error.errno in _PASSING:
        return os.strerror(error.errno)
    causes: list[str] = []
    # A thread that nobody waits for: a disk behind a network may never answer.
    look = threading.Thread(target=lambda: causes.append(_without_room(folders)), daemon=True)
    look.start()
    for _ in range(_LOOKS):
        if not look.is_alive():
            return causes[0] if causes else ""  # a bug of ours, which ends nobody
        await asyncio.sleep(_LOOK_S)
    return f"one of these does not answer: {', '.join(map(str, folders))}"


def _without_room(folders: Iterable[Path]) -> str:
    causes = []
    for folder in folders:
        try:
            there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
            disk = os.statvfs(there)
        except OSError as failed:
            causes.append(f"{folder}: {failed.strerror}")
            continue
        if disk.f_flag & os.ST_RDONLY:
            causes.append(f"{there} is read-only")
        elif (free := disk.f_bavail * disk.f_frsize) < _ROOM_BYTES:
            causes.append(f"the disk of {there} is full, with {free} bytes left")
        elif disk.f_files and not disk.f_favail:
            causes.append(f"the disk of {there} has no room for one more file")
    return "; ".join(causes)
