"""A file on its way to the disk: never whole in memory, and gone if it does not arrive whole.

Its size, its owner's quota and the space on the disk are looked at while it comes, so nothing that
a client announces or leaves unsaid gets more. Knows no form.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from engine.errors import BodyTooLarge, Overloaded
from server.storage.database import full, translated
from server.storage.records import FileRecord, new_file_id
from server.storage.store import Store, check_quota

MAX_UPLOADS = 64
"""Files that one process takes at once; each has up to CHUNK_BYTES in memory."""
CHUNK_BYTES = 1024 * 1024
"""Bytes written at once."""
LEAST_FREE_BYTES = 256 * 1024**2
"""Bytes of the disk that uploads leave free, for results of batches."""
_RETRY_S = 5

T = TypeVar("T")


class Uploads:
    """All uploads that a process is receiving."""

    def __init__(
        self, store: Store, threads: ThreadPoolExecutor, max_file_bytes: int, max_store_bytes: int
    ) -> None:
        self.store = store
        self.threads = threads
        self.max_file_bytes = max_file_bytes
        self._max_store_bytes = max_store_bytes
        self._coming: Counter[str] = Counter()
        """Bytes received of incomplete files, by owner."""
        self._num_coming = 0

    def begin(self, owner: str) -> Upload:
        """Begin an upload, which must be ended. Raises Overloaded."""
        if self._num_coming >= MAX_UPLOADS:
            raise Overloaded(f"{MAX_UPLOADS} files are being uploaded already", _RETRY_S)
        self._num_coming += 1
        return Upload(self, owner)

    def count(self, owner: str, num_bytes: int) -> None:
        """Count bytes received."""
        self._coming[owner] += num_bytes

    def check_room(self, owner: str, kept_bytes: int) -> None:
        """Raise QuotaExceeded or StoreFull if incomplete files do not fit beside `kept_bytes`.

        `keep` makes the final check.
        """
        check_quota(kept_bytes + self._coming[owner], self._max_store_bytes)
        if self.store.free_bytes() < LEAST_FREE_BYTES:
            raise full(self.store.folder)

    def keep(self, record: FileRecord) -> None:
        """Add a complete file to the store. Blocks. Raises QuotaExceeded and StoreError."""
        self.store.add_upload(record, self._max_store_bytes)

    def end(self, owner: str, num_bytes: int) -> None:
        self._num_coming -= 1
        self._coming[owner] -= num_bytes
        if not self._coming[owner]:
            del self._coming[owner]


class Upload:
    """One file. Whoever begins it calls `end`, which removes what is not kept by then."""

    def __init__(self, uploads: Uploads, owner: str) -> None:
        self.id = new_file_id()
        self.num_bytes = 0
        self._uploads = uploads
        self._owner = owner
        self._buffer: list[bytes] = []
        self._buffered = 0
        self._kept_bytes = 0
        """Bytes that its owner had stored when it began."""
        self._path: Path | None = None
        self._file = -1
        self._last: Future[None] | None = None
        """The work that a thread does, or did last, for this file."""

    async def open(self) -> None:
        """Create the file. Raises QuotaExceeded and StoreError."""
        await self._run(self._open)

    async def write(self, data: bytes) -> None:
        """Add bytes to the file. Raises BodyTooLarge, QuotaExceeded and StoreError."""
        self.num_bytes += len(data)
        self._uploads.count(self._owner, len(data))
        if self.num_bytes > self._uploads.max_file_bytes:
            most = self._uploads.max_file_bytes
            raise BodyTooLarge(f"the file is larger than max_file_bytes = {most}")
        self._buffer.append(data)
        self._buffered += len(data)
        if self._buffered >= CHUNK_BYTES:
            await self._run(self._write, self._taken())

    async def keep(self, record: FileRecord) -> None:
        """Complete the upload and store the file. Raises QuotaExceeded and StoreError."""
        await self._run(self._write, self._taken())
        await self._run(self._keep, record)

    def end(self) -> None:
        """End the upload, kept or not. Does not wait: a thread may be writing to the file."""
        self._uploads.end(self._owner, self.num_bytes)
        if self._last is not None:
            self._last.add_done_callback(lambda _: self._discard())

    async def _run(self, function: Callable[..., None], *args: object) -> None:
        self._last = self._uploads.threads.submit(function, *args)
        await asyncio.wrap_future(self._last)

    def _taken(self) -> list[bytes]:
        """Return what is buffered, and empty the buffer."""
        taken, self._buffer, self._buffered = self._buffer, [], 0
        return taken

    def _open(self) -> None:
        path = self._uploads.store.upload_path(self.id)
        with translated(self._uploads.store.folder):
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._path = path
        self._kept_bytes = self._uploads.store.bytes_of(self._owner)
        self._uploads.check_room(self._owner, self._kept_bytes)

    def _write(self, pieces: list[bytes]) -> None:
        self._uploads.check_room(self._owner, self._kept_bytes)
        with translated(self._uploads.store.folder):
            for piece in pieces:
                left = memoryview(piece)
                while left:
                    left = left[os.write(self._file, left) :]

    def _keep(self, record: FileRecord) -> None:
        with translated(self._uploads.store.folder):
            os.fsync(self._file)
        self._uploads.keep(record)
        self._path = None

    def _discard(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        if self._path is not None:
            self._path.unlink(missing_ok=True)
