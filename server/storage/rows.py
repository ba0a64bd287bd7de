"""The SQL of the store: rows of files and of batches, each with its whole record.

Fields that queries use have columns of their own; everything else is in the record, as JSON. Rows
are numbered in the order in which they came, which is that of lists. A deleted file leaves its
number for some time, so that a list can be continued after it. Knows no transactions.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from typing import TypeVar

import msgspec

from engine.errors import UNDECODABLE
from server.storage.database import Damaged
from server.storage.records import RUNNABLE, BatchRecord, FileRecord

_Record = TypeVar("_Record", FileRecord, BatchRecord)
_RUNNABLE = ", ".join(f"'{status}'" for status in sorted(RUNNABLE))


def put_file(connection: sqlite3.Connection, record: FileRecord) -> None:
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


def get_file(connection: sqlite3.Connection, id: str, owner: str | None) -> FileRecord | None:
    row = connection.execute(
        "SELECT record FROM files WHERE id = ?1 AND deleted_at IS NULL"
        " AND (?2 IS NULL OR owner = ?2)",
        (id, owner),
    ).fetchone()
    return _decoded(row[0], FileRecord) if row else None


def has_file(connection: sqlite3.Connection, id: str) -> bool:
    """Return whether there is, or lately was, a file of this id."""
    found = connection.execute("SELECT 1 FROM files WHERE id = ?", (id,)).fetchone()
    return found is not None


def list_files(
    connection: sqlite3.Connection,
    owner: str,
    limit: int,
    after: str | None,
    is_ascending: bool,
    purpose: str | None,
) -> list[FileRecord] | None:
    start = _start(connection, "files", owner, after)
    if start is None:
        return None
    order, beyond = ("ASC", ">") if is_ascending else ("DESC", "<")
    found = connection.execute(
        "SELECT record FROM files WHERE owner = ?1 AND deleted_at IS NULL"
        f" AND (?2 = 0 OR seq {beyond} ?2) AND (?3 IS NULL OR purpose = ?3)"
        f" ORDER BY seq {order} LIMIT ?4",
        (owner, start, purpose, limit),
    )
    return [_decoded(row[0], FileRecord) for row in found]


def delete_file(connection: sqlite3.Connection, id: str, now: int) -> None:
    connection.execute("UPDATE files SET deleted_at = ? WHERE id = ?", (now, id))


def forget_deleted(connection: sqlite3.Connection, before: int) -> None:
    connection.execute("DELETE FROM files WHERE deleted_at < ?", (before,))


def bytes_of(connection: sqlite3.Connection, owner: str | None, least: int) -> int:
    """Return the bytes of an owner's files, or of all; each counts for at least `least`."""
    (found,) = connection.execute(
        "SELECT COALESCE(SUM(MAX(num_bytes, ?1)), 0) FROM files"
        " WHERE deleted_at IS NULL AND (?2 IS NULL OR owner = ?2)",
        (least, owner),
    ).fetchone()
    return int(found)


def expired_files(connection: sqlite3.Connection, now: int) -> list[str]:
    """Return the ids of expired files that no running batch needs."""
    found = connection.execute(
        "SELECT id FROM files WHERE deleted_at IS NULL AND expires_at <= ? ORDER BY seq", (now,)
    ).fetchall()
    return [id for (id,) in found if needed_by(connection, id) is None]


def needed_by(connection: sqlite3.Connection, id: str) -> str | None:
    """Return the id of a running batch that reads or writes a file."""
    row = connection.execute(
        f"SELECT id FROM batches WHERE status IN ({_RUNNABLE})"
        " AND ?1 IN (input_file_id, output_file_id, error_file_id)",
        (id,),
    ).fetchone()
    return str(row[0]) if row else None


def written_by(connection: sqlite3.Connection, id: str) -> str | None:
    """Return the id of a running batch that writes a file."""
    row = connection.execute(
        f"SELECT id FROM batches WHERE status IN ({_RUNNABLE})"
        " AND ?1 IN (output_file_id, error_file_id)",
        (id,),
    ).fetchone()
    return str(row[0]) if row else None


def put_batch(connection: sqlite3.Connection, record: BatchRecord) -> None:
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


def get_batch(connection: sqlite3.Connection, id: str, owner: str | None) -> BatchRecord | None:
    row = connection.execute(
        "SELECT record FROM batches WHERE id = ?1 AND (?2 IS NULL OR owner = ?2)", (id, owner)
    ).fetchone()
    return _decoded(row[0], BatchRecord) if row else None


def has_batch(connection: sqlite3.Connection, id: str) -> bool:
    found = connection.execute("SELECT 1 FROM batches WHERE id = ?", (id,)).fetchone()
    return found is not None


def list_batches(
    connection: sqlite3.Connection, owner: str, limit: int, after: str | None
) -> list[BatchRecord] | None:
    start = _start(connection, "batches", owner, after)
    if start is None:
        return None
    found = connection.execute(
        "SELECT record FROM batches WHERE owner = ?1 AND (?2 = 0 OR seq < ?2)"
        " ORDER BY seq DESC LIMIT ?3",
        (owner, start, limit),
    )
    return [_decoded(row[0], BatchRecord) for row in found]


def batches_in(connection: sqlite3.Connection, statuses: Iterable[str]) -> list[BatchRecord]:
    """Return every batch with one of the statuses, oldest first."""
    wanted = sorted(statuses)
    found = connection.execute(
        f"SELECT record FROM batches WHERE status IN ({', '.join('?' * len(wanted))}) ORDER BY seq",
        wanted,
    )
    return [_decoded(row[0], BatchRecord) for row in found]


def count_running(connection: sqlite3.Connection, owner: str) -> int:
    (found,) = connection.execute(
        f"SELECT COUNT(*) FROM batches WHERE owner = ? AND status IN ({_RUNNABLE})", (owner,)
    ).fetchone()
    return int(found)


def count_by_status(connection: sqlite3.Connection) -> dict[str, int]:
    return dict(connection.execute("SELECT status, COUNT(*) FROM batches GROUP BY status"))


def _decoded(data: bytes, kind: type[_Record]) -> _Record:
    try:
        return msgspec.json.decode(data, type=kind)
    except UNDECODABLE as error:
        raise Damaged(f"a record is none: {error}") from None


def _start(connection: sqlite3.Connection, table: str, owner: str, after: str | None) -> int | None:
    """Return the number of the row that a list continues after; 0: from the beginning; None: no
    such row."""
    if after is None:
        return 0
    row = connection.execute(
        f"SELECT seq FROM {table} WHERE id = ? AND owner = ?", (after, owner)
    ).fetchone()
    return int(row[0]) if row else None
