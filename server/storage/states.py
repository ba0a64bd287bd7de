"""States of prompts, and responses, on disk, in an SQLite database that all processes of the server
share.

A state is some ten kilobytes, which SQLite reads as fast as a file, and the kernel keeps what is
used in memory. A change is on the disk when the call returns, but for a loss of power. Blocks, so
asyncio callers use a thread.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from srm.engine.state_file import StateContent
from srm.errors import UNDECODABLE, StoreError
from srm.server.errors import Conflict, QuotaExceeded
from srm.server.schema.states import StateObject
from srm.server.storage.database import full, transact, translated

_SPARE_BYTES = 16 * 1024**2
"""Room on the disk that states leave: to delete takes some, too, and to end what is pending."""
_VERSION = 1
_PRAGMAS = {
    "synchronous": "NORMAL",
    "secure_delete": "ON",  # a state is its owner's prompt
}
_IS_THERE = "(expires_at > ? OR is_held(id))"
"""SQL: a state has not expired. One that is being made does not expire."""
_SCHEMA = f"""
PRAGMA auto_vacuum = FULL;
PRAGMA journal_mode = WAL;
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS states (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL,
    owner TEXT NOT NULL,
    num_bytes INTEGER NOT NULL,
    expires_at INTEGER NOT NULL,
    record BLOB NOT NULL,
    token_ids BLOB NOT NULL,
    state BLOB NOT NULL,
    UNIQUE (owner, id)
) STRICT;
CREATE INDEX IF NOT EXISTS states_of_owner ON states (owner, seq);
CREATE INDEX IF NOT EXISTS states_by_end ON states (expires_at);
CREATE TABLE IF NOT EXISTS used (owner TEXT PRIMARY KEY, num_bytes INTEGER NOT NULL) STRICT;
CREATE TRIGGER IF NOT EXISTS added AFTER INSERT ON states BEGIN
    INSERT INTO used VALUES (new.owner, new.num_bytes)
    ON CONFLICT (owner) DO UPDATE SET num_bytes = num_bytes + new.num_bytes;
END;
CREATE TRIGGER IF NOT EXISTS deleted AFTER DELETE ON states BEGIN
    UPDATE used SET num_bytes = num_bytes - old.num_bytes WHERE owner = old.owner;
    DELETE FROM used WHERE owner = old.owner AND num_bytes <= 0;
END;
PRAGMA user_version = {_VERSION};
COMMIT;
"""

T = TypeVar("T")


class StateRecord(StateObject, frozen=True, kw_only=True):
    """What is kept of a state besides its content."""

    id: Annotated[str, Meta(pattern=r"^(state|resp)_[0-9a-f]{32}\Z")]
    owner: str = ""
    """Name of the API key that it belongs to; empty without keys."""
    digest: str = ""
    turn: Raw | UnsetType = UNSET
    """Of a response: what it is besides its tokens, as JSON."""
    is_pending: bool = False
    """Whether it is still being made, and another one is to take its place."""
    is_lost: bool = False
    """Whether nobody makes it any more; not kept."""


def new_state_id() -> str:
    """Return an id that cannot be guessed."""
    return f"state_{secrets.token_hex(16)}"


class StateStore:
    """The states in a folder, which is made when the first is put into it.

    Every method may raise StoreError: what it was to do is then not done. Expired states are as if
    they were not there. May be used from several threads.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self._path = folder.expanduser() / "states.sqlite3"
        self._clock = clock
        self._connection: sqlite3.Connection | None = None
        self._lock = threading.Lock()
        self._held: set[str] = set()
        """Ids of what this process makes, each with a lock of a byte, which ends with it."""
        self._locks = -1  # their file; to close it ends them

    def close(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                os.close(self._locks)
                self._connection = None

    def release(self, id: str) -> None:
        """Say that nothing comes any more of what was added as pending. Does not block."""
        self._held.discard(id)
        if self._connection is not None:
            fcntl.lockf(self._locks, fcntl.LOCK_UN, 1, _place(id))

    def add(
        self,
        record: StateRecord,
        content: StateContent,
        max_bytes: int = 0,
        is_end: bool = False,
    ) -> StateRecord:
        """Add a state; return the record that is there. Adding the same again changes nothing. With
        `is_end` it takes the place of a pending one, and is dropped if that has ended.

        Raises QuotaExceeded if its owner would have more than `max_bytes` (0: no limit), Conflict
        if another state has the id.
        """

        def add(connection: sqlite3.Connection) -> StateRecord:
            self._sweep(connection)
            takes_room = bool(content.token_ids) or not is_end
            if takes_room and shutil.disk_usage(self._path.parent).free < _SPARE_BYTES:
                raise full(self._path.parent, _SPARE_BYTES)
            row = self._row(connection, "record", record.id, record.owner)
            there = self._decoded(row[0]) if row else None
            if is_end:
                if there is None or not there.is_pending:
                    return record
                own = record.id, record.owner
                connection.execute("DELETE FROM states WHERE id = ? AND owner = ?", own)
            elif there is not None:
                if there.digest != record.digest:
                    raise Conflict(f"id {record.id!r} is that of another state", "state_id")
                return there
            used = self._used(connection, record.owner)
            if max_bytes and used + record.num_bytes > max_bytes:
                raise QuotaExceeded(
                    f"your states take {used} bytes, this one {record.num_bytes}, and "
                    f"max_state_bytes = {max_bytes}: delete some"
                )
            connection.execute(
                "INSERT INTO states (id, owner, num_bytes, expires_at, record, token_ids, state) "
                "VALUES (?, ?, ?, ?, ?, ?, ?)",
                (
                    *(record.id, record.owner, record.num_bytes, record.expires_at),
                    *(msgspec.json.encode(record), content.token_ids, content.state),
                ),
            )
            if record.is_pending:
                fcntl.lockf(self._locks, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _place(record.id))
                self._held.add(record.id)
            return record

        return self._run(add, is_writing=True)

    def get(self, id: str, owner: str) -> tuple[StateRecord, StateContent] | None:
        """Return an owner's state; None if there is none. Raises StoreError for a damaged one."""

        def get(connection: sqlite3.Connection) -> tuple[StateRecord, StateContent] | None:
            is_held = self._is_held(id)  # before it is read, since it ends before it is released
            row = self._row(connection, "record, token_ids, state", id, owner)
            if row is None:
                return None
            record, content = self._decoded(row[0]), StateContent(*row[1:])
            if record.is_pending and not is_held:
                record = msgspec.structs.replace(record, is_lost=True)
            if content.digest(record.fingerprint, record.arithmetic) != record.digest:
                raise StoreError(f"state {id} is damaged in {self._path}: delete it")
            return record, content

        return self._run(get, if_none=lambda: None)

    def list(self, owner: str, limit: int, after: str | None = None) -> list[StateRecord] | None:
        """Return at most `limit` states of an owner, newest first, and no responses; None without
        that `after`."""

        def list_states(connection: sqlite3.Connection) -> list[StateRecord] | None:
            before = 2**63 - 1
            if after is not None:
                if (row := self._row(connection, "seq", after, owner)) is None:
                    return None
                (before,) = row
            rows = connection.execute(
                "SELECT record FROM states WHERE owner = ? AND seq < ? AND expires_at > ? "
                "AND id GLOB 'state_*' ORDER BY seq DESC LIMIT ?",
                (owner, before, int(self._clock()), limit),
            )
            return [self._decoded(data) for (data,) in rows]

        return self._run(list_states, if_none=lambda: None if after else [])

    def delete(self, id: str, owner: str) -> bool:
        """Delete a state; return whether it was there."""

        def delete(connection: sqlite3.Connection) -> bool:
            deleted = connection.execute(
                f"DELETE FROM states WHERE id = ? AND owner = ? AND {_IS_THERE}",
                (id, owner, int(self._clock())),
            )
            return deleted.rowcount > 0

        return self._run(delete, is_writing=True, if_none=lambda: False)

    def expire(self) -> None:
        """Delete what has expired."""
        self._run(self._sweep, is_writing=True, if_none=lambda: None)

    def bytes_of(self, owner: str) -> int:
        """Return the bytes that an owner's states count for."""
        return self._run(lambda connection: self._used(connection, owner), if_none=lambda: 0)

    def _is_held(self, id: str) -> bool:
        """Whether a process makes what has this id."""
        if id in self._held:  # no lock keeps out its own process
            return True
        try:
            fcntl.lockf(self._locks, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, _place(id))
        except BlockingIOError:
            return True
        fcntl.lockf(self._locks, fcntl.LOCK_UN, 1, _place(id))
        return False

    def _row(
        self, connection: sqlite3.Connection, columns: str, id: str, owner: str
    ) -> tuple[Any, ...] | None:
        row: tuple[Any, ...] | None = connection.execute(
            f"SELECT {columns} FROM states WHERE id = ? AND owner = ? AND {_IS_THERE}",
            (id, owner, int(self._clock())),
        ).fetchone()
        return row

    def _decoded(self, data: bytes) -> StateRecord:
        try:
            return msgspec.json.decode(data, type=StateRecord)
        except UNDECODABLE as error:
            raise StoreError(f"a record in {self._path} is damaged: {error}") from None

    @staticmethod
    def _used(connection: sqlite3.Connection, owner: str) -> int:
        row = connection.execute("SELECT num_bytes FROM used WHERE owner = ?", (owner,)).fetchone()
        return 0 if row is None else int(row[0])

    def _sweep(self, connection: sqlite3.Connection) -> None:
        """Delete expired states."""
        expired = "expires_at <= ? AND NOT is_held(id)"
        connection.execute(f"DELETE FROM states WHERE {expired}", (int(self._clock()),))

    def _run(
        self,
        work: Callable[[sqlite3.Connection], T],
        is_writing: bool = False,
        if_none: Callable[[], T] | None = None,
    ) -> T:
        """Return the result of `work`, run in a transaction; of `if_none`, without a database."""
        with self._lock, translated(self._path.parent):
            if self._connection is None:
                if if_none is not None and not self._path.exists():
                    return if_none()
                self._connection = self._opened()
            return transact(self._connection, work, is_writing)

    def _opened(self) -> sqlite3.Connection:
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._path.touch(mode=0o600)
        connection = sqlite3.connect(
            self._path, timeout=30, isolation_level=None, check_same_thread=False
        )
        try:
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version not in {0, _VERSION}:
                raise StoreError(
                    f"{self._path} has version {version} and this program knows {_VERSION}: a "
                    "newer one has made it; use that, or another data_dir"
                )
            if version == 0:
                connection.executescript(_SCHEMA)
            for name, value in _PRAGMAS.items():
                connection.execute(f"PRAGMA {name} = {value}")
            file = self._path.with_name("responses.lock")
            self._locks = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
            connection.create_function("is_held", 1, self._is_held)
        except BaseException:
            connection.close()
            raise
        return connection


def _place(id: str) -> int:
    """Return which byte is locked for an id."""
    return int.from_bytes(blake2b(id.encode(), digest_size=7).digest(), "little")
