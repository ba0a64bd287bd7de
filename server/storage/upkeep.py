"""Regular upkeep of a store: expires files, restores lost records, removes what crashes left.

Knows no HTTP, and nothing of how a batch is run.
"""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path

from server.storage import rows
from server.storage.database import Database, translated
from server.storage.records import is_file_id
from server.storage.sidecars import Sidecars

ABANDONED_S = 3600
"""Seconds without a write after which a file that no record names counts as left by a crash."""
CURSORS_KEPT_S = 24 * 3600
"""Seconds for which a list can be continued after a deleted file."""


def add_missing(sidecars: Sidecars, connection: sqlite3.Connection) -> None:
    """Add to a database what the sidecars have and it lacks."""
    batch_ids, file_ids = _missing(sidecars, connection)
    for batch in sidecars.batches(batch_ids):
        rows.put_batch(connection, batch)
    for file in sidecars.files(file_ids):
        if rows.written_by(connection, file.id) is None:  # it is not whole yet
            rows.put_file(connection, file)


def _missing(sidecars: Sidecars, connection: sqlite3.Connection) -> tuple[list[str], list[str]]:
    """Return the ids of batches and of files that have sidecars and no rows."""
    batch_ids = [id for id in sidecars.batch_ids() if not rows.has_batch(connection, id)]
    return batch_ids, [id for id in sidecars.file_ids() if not rows.has_file(connection, id)]


class Upkeep:
    """Upkeep of the store in a folder."""

    def __init__(self, folder: Path, database: Database, sidecars: Sidecars) -> None:
        self._folder = folder
        self._files = folder / "files"
        self._database = database
        self._sidecars = sidecars

    def expire(self, now: int) -> int:
        """See `Store.expire`."""
        if not self._files.exists():
            return 0

        def is_missing(connection: sqlite3.Connection) -> bool:
            return any(_missing(self._sidecars, connection))

        def sweep(connection: sqlite3.Connection) -> list[str]:
            if has_missing:
                add_missing(self._sidecars, connection)
            ids = rows.expired_files(connection, now)
            for id in ids:
                rows.delete_file(connection, id, now)
                self._sidecars.remove_file(id)
            rows.forget_deleted(connection, now - CURSORS_KEPT_S)
            return ids

        has_missing = self._database.read(is_missing)  # keeps no writer waiting
        ids = self._database.write(sweep)
        with translated(self._folder):
            for id in ids:
                (self._files / id).unlink(missing_ok=True)
            self._remove_abandoned(now - ABANDONED_S)
        return len(ids)

    def _remove_abandoned(self, before: int) -> None:
        """Remove bytes that no record names: half an upload, or a file whose deletion was cut
        short."""
        for path in self._files.iterdir():
            id = path.name.split(".")[0]
            is_ours = is_file_id(id) and path.suffix != ".json"
            if is_ours and _modified_at(path) < before and not self._is_named(id):
                path.unlink(missing_ok=True)

    def _is_named(self, id: str) -> bool:
        def find(connection: sqlite3.Connection) -> bool:
            is_file = rows.get_file(connection, id, None) is not None
            return is_file or rows.needed_by(connection, id) is not None

        return self._sidecars.has_file(id) or self._database.read(find)


def _modified_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # somebody else has removed it, or renamed it
        return time.time()
