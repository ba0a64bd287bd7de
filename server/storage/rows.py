"""The SQL of the store: rows of files and of batches, each with its whole record.

Fields that queries use have columns of their own; everything else is in the record, as JSON. Rows
are numbered in the order in which they came, which is that of lists. A deleted file leaves its
number for some time, so that a list can be continued after it. Knows no transactions.
"""

from __future__ import annotations

from sqlite3 import Connection
from typing import TypeVar

import msgspec

from engine.errors import UNDECODABLE
from server.storage.database import DamagedDatabase
from server.storage.records import RUNNABLE, BatchRecord, FileRecord

Record = TypeVar("Record", FileRecord, BatchRecord)
_RUNNABLE = ", ".join(f"'{status}'" for status in sorted(RUNNABLE))
_TABLES = {FileRecord: "files", BatchRecord: "batches"}
_ROWS = {FileRecord: "files WHERE deleted_at IS NULL AND", BatchRecord: "batches WHERE"}
"""Rows that are there for clients, as far as a query begins with it."""


def put_file(connection: Connection, record: FileRecord) -> None:
    """Add a file, or replace its record."""
    connection.execute(
        "INSERT INTO files (id, owner, purpose, num_bytes, expires_at, record)"
        " VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET owner = excluded.owner,"
        " purpose = excluded.purpose, num_bytes = excluded.num_bytes,"
        " expires_at = excluded.expires_at, record = excluded.record, deleted_at = NULL",
        (
            *(record.id, record.owner, record.purpose, record.num_bytes, record.expires_at),
            msgspec.json.encode(record),
        ),
    )


def put_batch(connection: Connection, record: BatchRecord) -> None:
    """Add a batch, or replace its record."""
    connection.execute(
        "INSERT INTO batches"
        " (id, owner, status, input_file_id, output_file_id, error_file_id, record)"
        " VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET status = excluded.status,"
        " output_file_id = excluded.output_file_id, error_file_id = excluded.error_file_id,"
        " record = excluded.record",
        (
            *(record.id, record.owner, record.status, record.input_file_id),
            *(record.output_file_id, record.error_file_id, msgspec.json.encode(record)),
        ),
    )


def get(connection: Connection, kind: type[Record], id: str, owner: str | None) -> Record | None:
    """Return the record of an id; None if there is none, or it is not the given owner's."""
    row = connection.execute(
        f"SELECT record FROM {_ROWS[kind]} id = ?1 AND (?2 IS NULL OR owner = ?2)", (id, owner)
    ).fetchone()
    return _decoded(row[0], kind) if row else None


def has(connection: Connection, kind: type[FileRecord | BatchRecord], id: str) -> bool:
    """Return whether there is, or for files lately was, a row of this id."""
    found = connection.execute(f"SELECT 1 FROM {_TABLES[kind]} WHERE id = ?", (id,)).fetchone()
    return found is not None


def list_of(
    connection: Connection,
    kind: type[Record],
    owner: str,
    limit: int,
    after: str | None,
    is_ascending: bool = False,
    purpose: str | None = None,
) -> list[Record] | None:
    """Return at most `limit` records that follow `after`; None if there is no such row."""
    start = 0
    if after is not None:
        row = connection.execute(
            f"SELECT seq FROM {_TABLES[kind]} WHERE id = ? AND owner = ?", (after, owner)
        ).fetchone()
        if row is None:
            return None
        start = row[0]
    order, beyond = ("ASC", ">") if is_ascending else ("DESC", "<")
    of_purpose = "purpose = ?4" if kind is FileRecord else "FALSE"
    found = connection.execute(
        f"SELECT record FROM {_ROWS[kind]} owner = ?1 AND (?2 = 0 OR seq {beyond} ?2)"
        f" AND (?4 IS NULL OR {of_purpose}) ORDER BY seq {order} LIMIT ?3",
        (owner, start, limit, purpose),
    )
    return [_decoded(row[0], kind) for row in found]


def delete_file(connection: Connection, id: str, now: int) -> None:
    connection.execute("UPDATE files SET deleted_at = ? WHERE id = ?", (now, id))


def forget_deleted(connection: Connection, before: int) -> None:
    connection.execute("DELETE FROM files WHERE deleted_at < ?", (before,))


def bytes_of(connection: Connection, owner: str | None, least: int) -> int:
    """Return the bytes of an owner's files, or of all; each counts for at least `least`."""
    (found,) = connection.execute(
        "SELECT COALESCE(SUM(MAX(num_bytes, ?1)), 0) FROM files"
        " WHERE deleted_at IS NULL AND (?2 IS NULL OR owner = ?2)",
        (least, owner),
    ).fetchone()
    return int(found)


def expired_files(connection: Connection, now: int) -> list[str]:
    """Return the ids of expired files that no running batch needs."""
    found = connection.execute(
        "SELECT id FROM files WHERE deleted_at IS NULL AND expires_at <= ? ORDER BY seq", (now,)
    ).fetchall()
    return [id for (id,) in found if needed_by(connection, id) is None]


def needed_by(connection: Connection, id: str, is_written: bool = False) -> str | None:
    """Return the id of a running batch that reads or writes a file; with `is_written`, writes."""
    read = "" if is_written else "input_file_id, "
    row = connection.execute(
        f"SELECT id FROM batches WHERE status IN ({_RUNNABLE})"
        f" AND ?1 IN ({read}output_file_id, error_file_id)",
        (id,),
    ).fetchone()
    return str(row[0]) if row else None


def running_batches(connection: Connection) -> list[BatchRecord]:
    """Return every owner's unfinished batches, oldest first."""
    found = connection.execute(
        f"SELECT record FROM batches WHERE status IN ({_RUNNABLE}) ORDER BY seq"
    )
    return [_decoded(row[0], BatchRecord) for row in found]


def count_running(connection: Connection, owner: str) -> int:
    (found,) = connection.execute(
        f"SELECT COUNT(*) FROM batches WHERE owner = ? AND status IN ({_RUNNABLE})", (owner,)
    ).fetchone()
    return int(found)


def count_by_status(connection: Connection) -> dict[str, int]:
    return dict(connection.execute("SELECT status, COUNT(*) FROM batches GROUP BY status"))


def _decoded(data: bytes, kind: type[Record]) -> Record:
    try:
        return msgspec.json.decode(data, type=kind)
    except UNDECODABLE as error:
        raise DamagedDatabase(f"a record is none: {error}") from None
