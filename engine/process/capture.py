"""Taking a snapshot beside stepping: parts are read between steps and written by a thread.

The parts are copies, so the engine goes on while they are written; and requests do not depend on
each other, so each may be read at another step. Only few parts are held at a time.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from srm.engine.process.snapshot import NAME, Stamp
from srm.engine.process.snapshot_writer import Record, SnapshotWriter
from srm.errors import SnapshotError

log = logging.getLogger(__name__)

PARTS_AHEAD = 2  # most parts that are read and not yet written


class Capture:
    """One snapshot, from its first part to its place in the folder."""

    def __init__(
        self,
        folder: Path,
        stamp: Callable[[], Stamp],
        parts: Iterator[list[Record]],
        weights_version: int,
    ) -> None:
        """`parts`, none of them empty, are read one by one, by whoever calls `advance`. `stamp`
        says under which conditions, which must not change; `weights_version` is only recorded."""
        self.error: SnapshotError | None = None
        self.num_sequences = self.num_requests = self.num_bytes = 0
        self.read_s = self.write_s = self.seconds = 0.0
        self._started = time.monotonic()
        self._stamp, self._first_stamp = stamp, stamp()
        self._folder, self._weights_version = folder, weights_version
        self.path = folder / NAME
        self._parts = parts
        self._queue: queue.Queue[list[Record] | None] = queue.Queue(PARTS_AHEAD)
        self._is_cancelled = False
        self._writing: threading.Thread | None = None
        self._has_all = False

    @property
    def is_over(self) -> bool:
        """Whether it is written, there was nothing to write, or `error` says why it is not."""
        if self._writing is not None:
            return not self._writing.is_alive()
        return self._has_all or self.error is not None

    @property
    def wants_part(self) -> bool:
        """Whether there is room for a part, and there may be one."""
        return not self._has_all and self.error is None and not self._queue.full()

    def advance(self) -> None:
        """Read a part; only if `wants_part`. Never waits."""
        started = time.monotonic()
        try:
            part = next(self._parts, None)
            if self._stamp() != self._first_stamp:
                raise SnapshotError("the weights were changed while a snapshot was taken")
        except SnapshotError as error:
            self.cancel(error)
            return
        self.read_s += time.monotonic() - started
        if part is not None:
            self.num_requests += len(part)
            self.num_sequences += sum(len(parked) for _, parked in part)
            if self._writing is None:
                # Not waited for by an interpreter that ends: its disk may be dead.
                self._writing = threading.Thread(target=self._write, name="snapshot", daemon=True)
                self._writing.start()
        else:
            self._has_all = True
        if self._writing is not None:
            self._queue.put(part)

    def cancel(self, error: SnapshotError) -> None:
        """Give the snapshot up; the one before it stays."""
        self.error = self.error or error
        self._is_cancelled = True
        if self._writing is not None:
            while not self._queue.empty():
                self._queue.get()
            self._queue.put(None)

    def _write(self) -> None:
        try:
            writer = SnapshotWriter(self._folder, self._first_stamp, self._weights_version)
            try:
                self._write_parts(writer)
            except BaseException:
                writer.discard()
                raise
        except SnapshotError as error:
            self.error = self.error or error
        except Exception as error:  # a bug, or no memory: the engine must not wait for ever
            log.exception("writing a snapshot failed")
            self.error = SnapshotError(f"writing a snapshot failed: {error!r}")
        self.seconds = time.monotonic() - self._started

    def _write_parts(self, writer: SnapshotWriter) -> None:
        while (part := self._queue.get()) is not None:
            started = time.monotonic()
            writer.add(part)
            self.write_s += time.monotonic() - started
        if self._is_cancelled:
            writer.discard()
            return
        started = time.monotonic()
        self.num_bytes = writer.finish()
        self.write_s += time.monotonic() - started
