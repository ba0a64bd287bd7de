"""The SQL of the store: rows of files and of batches, each with its whole record.

Fields that queries use have columns of their own; everything else is in the record, as JSON. Rows
are numbered in the order in which they came, which is that of lists. A deleted file leaves its
number for some time, so that a list can be continued after it. A record that is read is whole, and
its columns are what it says, or DamagedRecord is raised.
"""

from __future__ import annotations

from sqlite3 import Connection
from typing import Any, NamedTuple

from srm.errors import UNDECODABLE
from srm.server.storage.database import DamagedRecord
from srm.server.storage.records import RUNNABLE, BatchRecord, FileRecord, Record, decode, encode

_RUNNABLE = ", ".join(f"'{status}'" for status in sorted(RUNNABLE))
_TABLES: dict[type, str] = {FileRecord: "files", BatchRecord: "batches"}
_ROWS: dict[type, str] = {
    FileRecord: "files WHERE deleted_at IS NULL AND",
    BatchRecord: "batches WHERE",
}
"""Rows that are there for clients, as far as a query begins with it."""


_COLUMNS: dict[type, tuple[str, ...]] = {
    FileRecord: ("id", "owner", "purpose", "num_bytes", "expires_at"),
    BatchRecord: ("id", "owner", "status", "input_file_id", "output_file_id", "error_file_id"),
}
"""Fields that queries use."""
_AGAIN: dict[type, str] = {FileRecord: ", deleted_at = NULL", BatchRecord: ""}


class Row(NamedTuple):
    """A row that is not deleted, as it is there, whole or damaged."""

    seq: int
    id: str
    record: object
    columns: tuple[bytes | None, ...]

    def decoded(self, kind: type[Record]) -> Record:
        """Return what it says. Raises DamagedRecord if that is not what was put there."""
        try:
            record = decode(self.record, kind)
        except UNDECODABLE as error:
            raise DamagedRecord(f"the record of {self.id} is damaged: {error}") from None
        stored = [getattr(record, name) for name in _COLUMNS[kind]]
        if self.columns != tuple(
            None if column is None else str(column).encode() for column in stored
        ):
            raise DamagedRecord(f"the columns of {self.id} are not those of its record")
        return record


def put(connection: Connection, record: FileRecord | BatchRecord) -> None:
    """Add a file or a batch, or replace its record."""
    kind = type(record)
    names = (*_COLUMNS[kind], "record")
    changes = ", ".join(f"{name} = excluded.{name}" for name in names[1:])
    connection.execute(
        f"INSERT INTO {_TABLES[kind]} ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})"
        f" ON CONFLICT (id) DO UPDATE SET {changes}{_AGAIN[kind]}",
        (*(getattr(record, name) for name in names[:-1]), encode(record)),
    )


def put_at(connection: Connection, kind: type[Record], seq: int, record: Record | None) -> None:
    """Put a record in the place of a row in lists; with None, remove the row."""
    connection.execute(f"DELETE FROM {_TABLES[kind]} WHERE seq = ?", (seq,))
    if record is not None:
        put(connection, record)
        connection.execute(f"UPDATE {_TABLES[kind]} SET seq = ? WHERE id = ?", (seq, record.id))


def get(connection: Connection, kind: type[Record], id: str, owner: str | None) -> Record | None:
    """Return the record of an id; None if there is none, or it is not the given owner's."""
    where = "id = ?1 AND (?2 IS NULL OR owner = ?2)"
    rows = _rows(connection, kind, where, (id, owner))
    return rows[0].decoded(kind) if rows else None


def following(
    connection: Connection, kind: type[Record], after: int, limit: int
) -> list[tuple[int, Record]]:
    """Return at most `limit` records, or all if that is -1, that follow a number, with theirs."""
    rows = _rows(connection, kind, "seq > ? ORDER BY seq LIMIT ?", (after, limit))
    return [(row.seq, row.decoded(kind)) for row in rows]


def damaged(connection: Connection, kind: type[Record]) -> list[tuple[Row, DamagedRecord]]:
    """Return the rows that are damaged, with what they have."""
    rows = []
    for row in _rows(connection, kind, "TRUE", ()):
        try:
            row.decoded(kind)
        except DamagedRecord as error:
            rows.append((row, error))
    return rows


def _rows(
    connection: Connection, kind: type[Record], where: str, values: tuple[Any, ...]
) -> list[Row]:
    # As bytes: what is damaged may be no text, nor of its column's type. All at once: a statement
    # that is under way when one is found damaged would keep whoever mends it from writing.
    columns = ", ".join(f"CAST({name} AS BLOB)" for name in ("record", *_COLUMNS[kind]))
    cursor = connection.execute(f"SELECT seq, {columns} FROM {_ROWS[kind]} {where}", values)
    return [
        Row(seq, (stored[0] or b"").decode(errors="replace"), record, tuple(stored))
        for seq, record, *stored in cursor.fetchall()
    ]


def has(connection: Connection, kind: type[FileRecord | BatchRecord], id: str) -> bool:
    """Return whether there is, or for files lately was, a row of this id."""
    row = connection.execute(f"SELECT 1 FROM {_TABLES[kind]} WHERE id = ?", (id,)).fetchone()
    return row is not None


class Page(NamedTuple):
    """Part of a list: at most `limit` rows that follow that of the id `after`, newest first."""

    limit: int
    after: str | None
    is_ascending: bool = False


def list_of(
    connection: Connection,
    kind: type[Record],
    owner: str,
    page: Page,
    purpose: str | None = None,
) -> list[Record] | None:
    """Return the records of a page; None if there is no row that it follows."""
    start = 0
    if page.after is not None:
        row = connection.execute(
            f"SELECT seq FROM {_TABLES[kind]} WHERE id = ? AND owner = ?", (page.after, owner)
        ).fetchone()
        if row is None:
            return None
        start = row[0]
    order, beyond = ("ASC", ">") if page.is_ascending else ("DESC", "<")
    of_purpose = "purpose = ?4" if kind is FileRecord else "FALSE"
    where = (
        f"owner = ?1 AND (?2 = 0 OR seq {beyond} ?2)"
        f" AND (?4 IS NULL OR {of_purpose}) ORDER BY seq {order} LIMIT ?3"
    )
    rows = _rows(connection, kind, where, (owner, start, page.limit, purpose))
    return [row.decoded(kind) for row in rows]


def delete_file(connection: Connection, id: str, now: int) -> None:
    connection.execute("UPDATE files SET deleted_at = ? WHERE id = ?", (now, id))


def forget_deleted(connection: Connection, before: int) -> None:
    connection.execute("DELETE FROM files WHERE deleted_at < ?", (before,))


def bytes_of(connection: Connection, owner: str | None, least: int) -> int:
    """Return the bytes of an owner's files, or of all; each counts for at least `least`."""
    (num_bytes,) = connection.execute(
        "SELECT COALESCE(SUM(MAX(num_bytes, ?1)), 0) FROM files"
        " WHERE deleted_at IS NULL AND (?2 IS NULL OR owner = ?2)",
        (least, owner),
    ).fetchone()
    return int(num_bytes)


def expired_files(connection: Connection, now: int) -> list[str]:
    """Return the ids of expired files that no running batch needs."""
    rows = _rows(connection, FileRecord, "expires_at <= ? ORDER BY seq", (now,))
    if rows:  # a status that is damaged would say that nobody needs them
        following(connection, BatchRecord, 0, -1)
    ids = [row.decoded(FileRecord).id for row in rows]
    return [id for id in ids if needed_by(connection, id) is None]


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
    rows = _rows(connection, BatchRecord, f"status IN ({_RUNNABLE}) ORDER BY seq", ())
    return [row.decoded(BatchRecord) for row in rows]


def count_running(connection: Connection, owner: str) -> int:
    (count,) = connection.execute(
        f"SELECT COUNT(*) FROM batches WHERE owner = ? AND status IN ({_RUNNABLE})", (owner,)
    ).fetchone()
    return int(count)


def count_by_status(connection: Connection) -> dict[str, int]:
    return dict(connection.execute("SELECT status, COUNT(*) FROM batches GROUP BY status"))
