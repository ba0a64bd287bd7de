"""Regular upkeep of a store: expires files, restores lost records, removes what crashes left.

Knows no HTTP, and nothing of how a batch is run.
"""

from __future__ import annotations

import time
from pathlib import Path
from sqlite3 import Connection

from server.storage import rows
from server.storage.database import Database, translated
from server.storage.records import BatchRecord, FileRecord, is_file_id
from server.storage.sidecars import Sidecars

ABANDONED_S = 3600
"""Seconds without a write after which a file that no record names counts as left by a crash."""
CURSORS_KEPT_S = 24 * 3600
"""Seconds for which a list can be continued after a deleted file."""


def add_missing(sidecars: Sidecars, connection: Connection) -> None:
    """Add to a database what the sidecars have and it lacks."""
    batch_ids, file_ids = _missing(sidecars, connection)
    for batch in sidecars.read(BatchRecord, batch_ids):
        rows.put_batch(connection, batch)
    for file in sidecars.read(FileRecord, file_ids):
        if rows.needed_by(connection, file.id, is_written=True) is None:  # it is not whole yet
            rows.put_file(connection, file)


def _missing(sidecars: Sidecars, connection: Connection) -> list[list[str]]:
    """Return the ids of batches and of files that have sidecars and no rows."""
    return [
        [id for id in sidecars.ids(kind) if not rows.has(connection, kind, id)]
        for kind in (BatchRecord, FileRecord)
    ]


def expire(files: Path, database: Database, sidecars: Sidecars, now: int) -> int:
    """See `Store.expire`; `files` is the folder of the files' bytes."""
    if not files.exists():
        return 0

    def is_missing(connection: Connection) -> bool:
        return any(_missing(sidecars, connection))

    def sweep(connection: Connection) -> list[str]:
        if has_missing:
            add_missing(sidecars, connection)
        ids = rows.expired_files(connection, now)
        for id in ids:
            rows.delete_file(connection, id, now)
            sidecars.remove(FileRecord, id)
        rows.forget_deleted(connection, now - CURSORS_KEPT_S)
        return ids

    def is_wanted(connection: Connection, id: str) -> bool:
        is_file = rows.get(connection, FileRecord, id, None) is not None
        return is_file or rows.needed_by(connection, id) is not None

    def is_abandoned(path: Path) -> bool:
        """Whether no record names the bytes: half an upload, or a file half deleted."""
        id = path.name.split(".")[0]
        is_ours = is_file_id(id) and path.suffix != ".json"
        is_old = is_ours and _modified_at(path) < now - ABANDONED_S
        return is_old and not (sidecars.has_file(id) or database.read(is_wanted, id))

    has_missing = database.read(is_missing)  # keeps no writer waiting
    ids = database.write(sweep)
    with translated(files.parent):
        for id in ids:
            (files / id).unlink(missing_ok=True)
        for path in files.iterdir():
            if is_abandoned(path):
                path.unlink(missing_ok=True)
    return len(ids)


def _modified_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # somebody else has removed it, or renamed it
        return time.time()
