"""Files and batches on disk, shared by all processes of the server.

Records are rows of a database and sidecars beside what they describe; a file's bytes are
`files/<id>`, where the id is ours. Every change is one short transaction, on the disk when the call
returns. An owner is a tenant: the name of an API key. Blocks, so asyncio callers use a thread.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from sqlite3 import Connection
from typing import Any

import msgspec

from srm.errors import NotFound, StoreError
from srm.server.errors import Conflict, QuotaExceeded, RateLimited
from srm.server.storage import rows, upkeep
from srm.server.storage.database import Database, sync_folder, translated
from srm.server.storage.records import (
    KINDS,
    RUNNABLE,
    BatchRecord,
    FileRecord,
    is_file_id,
    new_file_id,
)
from srm.server.storage.sidecars import Sidecars

LEAST_BYTES = 4096
"""Bytes that even the smallest file counts for in a quota: it takes room too."""
_PROGRESS = {"completed", "failed", "input_tokens", "output_tokens", "cached_tokens"}
"""Fields that change all the time and can be recomputed: not worth a sidecar each time."""
_OUTPUTS = ("output_file_id", "error_file_id")
_RETRY_S = 60


class Store:
    """The files and batches in a folder, which is made when something is first put into it.

    Every method may raise StoreError: what it was to do is then not done.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.expanduser()
        self._files = self.folder / "files"
        self._sidecars = Sidecars(self.folder)
        fill, mend = (partial(check, self._sidecars) for check in (upkeep.add_missing, upkeep.mend))
        self._database = Database(self.folder, fill, mend, self._sidecars.has_any)
        self._looked_at: dict[type[FileRecord | BatchRecord], int] = {}

    def close(self) -> None:
        self._database.close()

    def path_of(self, file_id: str) -> Path:
        """Return where the bytes of a file are, or are to be. Raises StoreError for an invalid id,
        which no record has: it never becomes a path."""
        if not is_file_id(file_id):
            raise StoreError(f"{file_id[:80]!r} is no id of a file")
        return self._files / file_id

    def upload_path(self, file_id: str) -> Path:
        """Return where to write the bytes of an incomplete file; makes the folder."""
        path = self.path_of(file_id).with_suffix(".upload")
        with translated(self.folder):
            self._files.mkdir(parents=True, exist_ok=True, mode=0o700)
        return path

    def free_bytes(self) -> int:
        """Return the free bytes of the disk."""
        with translated(self.folder):
            return shutil.disk_usage(self._files).free

    # Files

    def add_upload(self, record: FileRecord, max_bytes: int = 0) -> None:
        """Take the bytes at `upload_path` as a file; they must be on the disk already.

        Raises QuotaExceeded if the owner would then have more than `max_bytes`. Whatever is raised,
        the bytes are gone.
        """
        path = self.path_of(record.id)

        def add(connection: Connection) -> None:
            used = rows.bytes_of(connection, record.owner, LEAST_BYTES)
            check_quota(used + max(record.num_bytes, LEAST_BYTES), max_bytes)
            if not path.exists():  # this may be the second attempt
                self.upload_path(record.id).rename(path)
                sync_folder(self._files)
            self._sidecars.write(record)
            rows.put(connection, record)

        try:
            self._database.write(add)
        except BaseException:
            with suppress(OSError):  # what went wrong first is what is said
                self._sidecars.remove(FileRecord, record.id)
            for left in (path, path.with_suffix(".upload")):
                with suppress(OSError):
                    left.unlink(missing_ok=True)
            raise

    def get_file(self, id: str, owner: str | None = None) -> FileRecord | None:
        """Return the file of an id; None if there is none, or it is not the given owner's."""
        return self._database.read(rows.get, FileRecord, id, owner)

    def list_files(
        self,
        owner: str,
        limit: int,
        after: str | None = None,
        is_ascending: bool = False,
        purpose: str | None = None,
    ) -> list[FileRecord] | None:
        """At most `limit` files, newest first unless `is_ascending`; None without that `after`."""
        page = rows.Page(limit, after, is_ascending)
        return self._database.read(rows.list_of, FileRecord, owner, page, purpose)

    def delete_file(self, id: str, owner: str) -> bool:
        """Delete a file; returns whether it was there. Raises Conflict while a batch needs it."""

        def delete(connection: Connection) -> bool:
            if rows.get(connection, FileRecord, id, owner) is None:
                return False
            if needed_by := rows.needed_by(connection, id):
                raise Conflict(f"file {id} is needed by batch {needed_by}, which runs")
            rows.delete_file(connection, id, int(time.time()))
            self._sidecars.remove(FileRecord, id)
            return True

        was_there = self._database.write(delete)
        if was_there:
            with translated(self.folder):
                self.path_of(id).unlink(missing_ok=True)
        return was_there

    def bytes_of(self, owner: str | None = None) -> int:
        """Return the bytes that the files of an owner, or of all, count for."""
        return self._database.read(rows.bytes_of, owner, LEAST_BYTES)

    # Batches

    def add_batch(self, record: BatchRecord, max_running: int = 0) -> None:
        """Add a batch. Raises NotFound if its input file is not there, and RateLimited if the owner
        has `max_running` that run (0: any number)."""

        def add(connection: Connection) -> None:
            if rows.get(connection, FileRecord, record.input_file_id, record.owner) is None:
                raise NotFound(f"there is no file {record.input_file_id[:80]!r}", "input_file_id")
            running = rows.count_running(connection, record.owner)
            if max_running and running >= max_running:
                raise RateLimited(
                    f"{running} batches run or wait, and max_batches = {max_running}: "
                    "try again when one has ended",
                    _RETRY_S,
                )
            self._sidecars.write(record)
            rows.put(connection, record)

        try:
            self._database.write(add)
        except BaseException:
            with suppress(OSError):
                self._sidecars.remove(BatchRecord, record.id)
            raise

    def get_batch(self, id: str, owner: str | None = None) -> BatchRecord | None:
        """Return the batch of an id; None if there is none, or it is not the given owner's."""
        return self._database.read(rows.get, BatchRecord, id, owner)

    def list_batches(
        self, owner: str, limit: int, after: str | None = None
    ) -> list[BatchRecord] | None:
        """Return at most `limit` batches, newest first; None if there is no batch `after`."""
        return self._database.read(rows.list_of, BatchRecord, owner, rows.Page(limit, after))

    def runnable_batches(self) -> list[BatchRecord]:
        """Return every owner's unfinished batches, oldest first."""
        return self._database.read(rows.running_batches)

    def change_batch(
        self, id: str, expected_status: str | Collection[str], **fields: Any
    ) -> BatchRecord | None:
        """Set fields of a batch if its status is (one of) the expected; None if it is not.

        A new `status` also sets its time, `<status>_at`, unless that is given.
        """
        return self._database.write(self._change, id, expected_status, fields)

    def allocate_output_ids(self, batch: BatchRecord) -> BatchRecord:
        """Return the batch with its output and error file ids, which never change afterwards."""
        assert batch.is_runnable

        def allocate(connection: Connection) -> BatchRecord:
            stored = rows.get(connection, BatchRecord, batch.id, None)
            assert stored is not None, batch.id
            if stored.output_file_id and stored.error_file_id:
                return stored
            fields = {name: getattr(stored, name) or new_file_id() for name in _OUTPUTS}
            changed = self._change(connection, batch.id, RUNNABLE, fields)
            assert changed is not None, batch.id
            return changed

        return self._database.write(allocate)

    def finish_batch(
        self, id: str, status: str, files: Sequence[FileRecord] = (), **fields: Any
    ) -> BatchRecord | None:
        """Give a batch its final status and add the files it made; None if it had one already.

        The files' bytes must be at `path_of` and on the disk. An output or error file id of the
        batch for which there is no file is set to None.
        """
        assert status not in RUNNABLE

        def finish(connection: Connection) -> BatchRecord | None:
            batch = rows.get(connection, BatchRecord, id, None)
            if batch is None or not batch.is_runnable:
                return None
            for file in files:
                self._sidecars.write(file)
                rows.put(connection, file)
            there = {file.id: file.id for file in files}
            ids = {name: there.get(getattr(batch, name)) for name in _OUTPUTS}
            return self._change(connection, id, RUNNABLE, {**ids, **fields, "status": status})

        return self._database.write(finish)

    def count_batches(self) -> dict[str, int]:
        """Return the number of batches by status, for statuses that any has."""
        return self._database.read(rows.count_by_status)

    # Upkeep

    def expire(self, now: int) -> int:
        """Delete expired files that no running batch needs; returns how many.

        Also restores what a new database lacks, mends what is damaged, and removes what crashes
        left.
        """
        with translated(self.folder):
            for kind in KINDS:
                after = self._looked_at.get(kind, 0)
                self._looked_at[kind] = upkeep.look_at(self._database, self._sidecars, kind, after)
        return upkeep.expire(self._files, self._database, self._sidecars, now)

    def _change(
        self,
        connection: Connection,
        id: str,
        expected_status: str | Collection[str],
        fields: dict[str, Any],
    ) -> BatchRecord | None:
        batch = rows.get(connection, BatchRecord, id, None)
        expected = {expected_status} if isinstance(expected_status, str) else expected_status
        if batch is None or batch.status not in expected:
            return None
        at = f"{fields.get('status')}_at"
        if at in BatchRecord.__struct_fields__ and fields["status"] != batch.status:
            fields = {at: int(time.time()), **fields}
        changed = msgspec.structs.replace(batch, **fields)
        if not fields.keys() <= _PROGRESS:
            self._sidecars.write(changed)
        rows.put(connection, changed)
        return changed


def check_quota(num_bytes: int, max_bytes: int) -> None:
    """Raise QuotaExceeded if an owner's files would be too large; 0 is no limit."""
    if max_bytes and num_bytes > max_bytes:
        raise QuotaExceeded(
            f"your files would take {num_bytes} bytes, and max_store_bytes = {max_bytes}: "
            "delete some"
        )
