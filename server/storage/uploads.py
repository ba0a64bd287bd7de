"""A file on its way to the disk: never whole in memory, and gone if it does not arrive whole.

Its size, its owner's quota and the space on the disk are looked at while it comes, so nothing that
a client announces or leaves unsaid gets more.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from srm.errors import Overloaded
from srm.server.errors import BodyTooLarge
from srm.server.storage.database import full, translated
from srm.server.storage.records import FileRecord, new_file_id
from srm.server.storage.store import Store, check_quota

MAX_UPLOADS = 64
"""Files that one process takes at once, half of them from one key; each has up to CHUNK_BYTES in
memory."""
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
        self.max_store_bytes = max_store_bytes
        self.coming: Counter[str] = Counter()
        """Bytes received of incomplete files, by owner."""
        self.num_coming: Counter[str] = Counter()
        """Incomplete files, by owner."""

    def begin(self, owner: str) -> Upload:
        """Begin an upload, which must be ended. Raises Overloaded."""
        if self.num_coming.total() >= MAX_UPLOADS:
            raise Overloaded(f"{MAX_UPLOADS} files are being uploaded already", _RETRY_S)
        if owner and self.num_coming[owner] >= (most := MAX_UPLOADS // 2):
            raise Overloaded(f"{most} files are being uploaded with this key already", _RETRY_S)
        self.num_coming[owner] += 1
        return Upload(self, owner)


class Upload:
    """One file. Whoever begins it calls `end`, which removes what is not kept by then."""

    def __init__(self, uploads: Uploads, owner: str) -> None:
        self.id = new_file_id()
        self.num_bytes = 0
        self._all = uploads
        self._store = uploads.store
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
        self._all.coming[self._owner] += len(data)
        if self.num_bytes > (most := self._all.max_file_bytes):
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
        self._all.num_coming[self._owner] -= 1
        if not self._all.num_coming[self._owner]:
            del self._all.num_coming[self._owner]
        self._all.coming[self._owner] -= self.num_bytes
        if not self._all.coming[self._owner]:
            del self._all.coming[self._owner]
        if self._last is not None:
            self._last.add_done_callback(lambda _: self._discard())

    async def _run(self, function: Callable[..., None], *args: object) -> None:
        self._last = self._all.threads.submit(function, *args)
        await asyncio.wrap_future(self._last)

    def _taken(self) -> list[bytes]:
        """Return what is buffered, and empty the buffer."""
        taken, self._buffer, self._buffered = self._buffer, [], 0
        return taken

    def _open(self) -> None:
        path = self._store.upload_path(self.id)
        with translated(self._store.folder):
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._path = path
        self._kept_bytes = self._store.bytes_of(self._owner)
        self._check_room()

    def _check_room(self) -> None:
        """Raise QuotaExceeded or StoreFull if what has come does not fit; `_keep` is the last."""
        kept_bytes = self._kept_bytes + self._all.coming[self._owner]
        check_quota(kept_bytes, self._all.max_store_bytes)
        if self._store.free_bytes() < LEAST_FREE_BYTES:
            raise full(self._store.folder, LEAST_FREE_BYTES)

    def _write(self, pieces: list[bytes]) -> None:
        self._check_room()
        with translated(self._store.folder):
            for piece in pieces:
                left = memoryview(piece)
                while left:
                    left = left[os.write(self._file, left) :]

    def _keep(self, record: FileRecord) -> None:
        with translated(self._store.folder):
            os.fsync(self._file)
        self._store.add_upload(record, self._all.max_store_bytes)
        self._path = None

    def _discard(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        if self._path is not None:
            self._path.unlink(missing_ok=True)
