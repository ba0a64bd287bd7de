"""PartFile: a file of results that is also the journal of the job that writes it.

What is put into it is kept in memory until the disk has it for certain. After a crash it holds
whole lines and perhaps a broken end, which `recover` cuts off. A full or failing disk loses
nothing: the file is cut back to whole lines, and the rest is written when there is room. Knows
bytes and lines, and nothing of what they say.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

from srm.server.storage.database import sync_folder

log = logging.getLogger(__name__)

_CHUNK = 1024 * 1024


class PartFile:
    """Lines, each put once. One process has it at a time; `sync` may run in a thread of its own
    while lines are put."""

    def __init__(self, path: Path, file: int | None = None) -> None:
        """Take an open file, or else open or create the one at the path. Raises OSError."""
        self.path = path
        is_new = file is None and not path.exists()
        if file is None:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._file = file
        self._lock = threading.Lock()
        self._lines: list[bytes] = []
        """Lines put since the last `sync`, which may not be on disk."""
        self._num_put = self._num_synced = 0  # bytes; each is changed by one thread only
        try:
            self._synced_size = os.fstat(file).st_size
            if is_new:
                sync_folder(path.parent)
        except OSError:
            os.close(file)
            raise

    @property
    def num_pending_bytes(self) -> int:
        """Bytes held in memory because they may not be on disk."""
        return self._num_put - self._num_synced

    @property
    def num_bytes(self) -> int:
        """Bytes of the file that are durably on disk."""
        return self._synced_size

    def recover(self, accepts: Callable[[bytes], bool]) -> int:
        """Pass each line to `accepts`, and cut the file before the first that it rejects or that
        has no newline. Returns how many bytes were cut."""
        with self._lock:  # a job that is cancelled meanwhile closes the file
            good, rest, at = 0, b"", 0
            while chunk := os.pread(self._file, _CHUNK, at):
                at += len(chunk)
                *whole, rest = (rest + chunk).split(b"\n")
                for line in whole:
                    if not accepts(line):
                        return self._cut(good)
                    good += len(line) + 1
            return self._cut(good)

    def put(self, line: bytes) -> None:
        """Take a line, without a newline, to be written by the next `sync`."""
        self._lines.append(line)
        self._num_put += len(line) + 1

    def sync(self) -> None:
        """Make all that was put durable on disk.

        Raises OSError if the disk is full or fails. The file then ends with a whole line; nothing
        is lost, and the next call tries again.
        """
        with self._lock:
            lines = self._lines[:]  # what is put meanwhile waits for the next one
            if data := b"".join(line + b"\n" for line in lines):
                self._write(data)
                del self._lines[: len(lines)]
                self._num_synced += len(data)

    def close(self) -> None:
        """Close the file; what was put since the last `sync` is lost."""
        with self._lock:
            os.close(self._file)

    def _write(self, data: bytes) -> None:
        written = 0
        try:
            while written < len(data):
                at = self._synced_size + written
                written += os.pwrite(self._file, memoryview(data)[written:], at)
            os.fsync(self._file)
        except OSError:
            # Which bytes a failed fsync has written is not known: all of it is written again.
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._synced_size + self._whole(data[:written]))
            raise
        self._synced_size += len(data)

    def _whole(self, data: bytes) -> int:
        """Return how many bytes of what was written can be read as they are."""
        return data.rfind(b"\n") + 1

    def _cut(self, size: int) -> int:
        end = os.fstat(self._file).st_size
        if end != size:
            log.warning("%s: its last %d bytes are no result: cut", self.path.name, end - size)
            os.ftruncate(self._file, size)
            os.fsync(self._file)
        self._synced_size = size
        return end - size
