"""Regular upkeep of a store: expires files, restores lost records, removes what crashes left.

A record is in two places. Where one of them is damaged, it is made again from the other.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from sqlite3 import Connection

from srm.errors import UNDECODABLE
from srm.server.storage import rows
from srm.server.storage.database import Database, translated
from srm.server.storage.records import KINDS, BatchRecord, FileRecord, Record, decode, is_file_id
from srm.server.storage.sidecars import Sidecars

log = logging.getLogger(__name__)

ABANDONED_S = 3600
"""Seconds without a write after which a file that no record names counts as left by a crash."""
CURSORS_KEPT_S = 24 * 3600
"""Seconds for which a list can be continued after a deleted file."""
LOOKED_AT = 10_000
"""Most records of a kind that one `expire` looks at, whether they are damaged."""


def add_missing(sidecars: Sidecars, connection: Connection) -> None:
    """Add to a database what the sidecars have and it lacks."""
    batch_ids, file_ids = _missing(sidecars, connection)
    for batch in sidecars.read(BatchRecord, batch_ids):
        rows.put(connection, batch)
    for file in sidecars.read(FileRecord, file_ids):
        if rows.needed_by(connection, file.id, is_written=True) is None:  # it is not whole yet
            rows.put(connection, file)


def mend(sidecars: Sidecars, connection: Connection) -> None:
    """Make damaged rows again from their sidecars; what has none is left out."""
    for kind in KINDS:
        for row, damage in rows.damaged(connection, kind):
            recovered = _recover(sidecars, kind, row)
            how = (
                "left out, since its sidecar is gone or damaged too"
                if recovered is None
                else "mended"
            )
            log.error("%s: %s", damage, how)
            rows.put_at(connection, kind, row.seq, recovered)


def _recover(sidecars: Sidecars, kind: type[Record], row: rows.Row) -> Record | None:
    """Return what a damaged row had: its sidecar says so, or its record if that is whole."""
    try:
        own = decode(row.record, kind)
    except UNDECODABLE:
        own = None
    for id in (row.id, "" if own is None else own.id):
        try:
            from_sidecar = sidecars.get(kind, id)
        except UNDECODABLE:
            continue
        if from_sidecar is not None:
            return from_sidecar
    return own


def look_at(database: Database, sidecars: Sidecars, kind: type[Record], after: int) -> int:
    """Mend what is damaged of the next records after a number; return the number to go on after.
    Columns that queries go by would otherwise hide a record for ever."""
    rows_read = database.read(rows.following, kind, after, LOOKED_AT)  # which mends rows

    def write(connection: Connection, id: str) -> None:
        record = rows.get(connection, kind, id, None)
        if record is not None:
            log.error("the sidecar of %s is gone or damaged: written anew", id)
            sidecars.write(record)

    for _, record in rows_read:
        try:
            is_whole = sidecars.is_whole(record)
        except IsADirectoryError as error:  # keeps no other from being looked at
            log.error("a sidecar cannot be read: %s", error)
            continue
        if not is_whole:
            database.write(write, record.id)
    return rows_read[-1][0] if len(rows_read) == LOOKED_AT else 0


def _missing(sidecars: Sidecars, connection: Connection) -> list[list[str]]:
    """Return the ids of batches and of files that have sidecars and no rows."""
    return [
        [id for id in sidecars.ids(kind) if not rows.has(connection, kind, id)] for kind in KINDS
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
    for id in ids:
        _remove(files / id)
    with translated(files.parent):
        for path in files.iterdir():
            if is_abandoned(path):
                _remove(path)
    return len(ids)


def _remove(path: Path) -> None:
    """Remove a file; one that cannot be, such as a folder of its name, keeps no other."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.error("%s cannot be removed: %s", path, error.strerror)


def _modified_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # somebody else has removed it, or renamed it
        return time.time()
