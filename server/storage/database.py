"""The SQLite database of files and batches: opened, shared with other processes, made anew.

Everything in it is also in sidecars (`server.storage.sidecars`), so a database that is damaged or
gone is made again from them. The damaged one stays where it is, since other processes may have it
open, and the new one has the next number: `store.sqlite3`, `store-2.sqlite3`, … A lock that
transactions share and a rebuild has alone keeps everybody on the same one.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import shutil
import sqlite3
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import cache
from itertools import count
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from srm.errors import StoreError, StoreFull
from srm.files import open_file

log = logging.getLogger(__name__)

VERSION = 1
"""Version of the tables below; kept in the database as its user_version."""
SCHEMA = f"""
CREATE TABLE files (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    purpose TEXT NOT NULL,
    num_bytes INTEGER NOT NULL,
    expires_at INTEGER,
    deleted_at INTEGER,
    record BLOB NOT NULL
) STRICT;
CREATE INDEX files_of_owner ON files (owner, seq);
CREATE TABLE batches (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    status TEXT NOT NULL,
    input_file_id TEXT NOT NULL,
    output_file_id TEXT,
    error_file_id TEXT,
    record BLOB NOT NULL
) STRICT;
CREATE INDEX batches_of_owner ON batches (owner, seq);
CREATE INDEX batches_by_status ON batches (status, seq);
PRAGMA user_version = {VERSION};
"""
_NAME = re.compile(r"store(?:-([2-9]|[1-9][0-9]{1,8}))?\.sqlite3")
_FARTHEST = 1_000
"""Most that a database's number exceeds the one before it: a file beyond is none of ours."""
_BUSY_S = 30
"""Seconds a transaction waits for those of other processes."""
_ATTEMPTS = 4
"""Most times that something is tried in a database that is damaged and then mended or made anew."""
_SHARED_BYTES = 32 * 1024
_HEADER = struct.Struct(">18xBB24xI")
"""The beginning of a database file: in which formats it is to be written, to be read, and to have
its tables described."""
_DAMAGE_CODES = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}

T = TypeVar("T")
P = ParamSpec("P")
Work = Callable[Concatenate[sqlite3.Connection, P], T]


class DamagedDatabase(Exception):
    """The open database is not one of ours, or is damaged; also raised by code that reads it."""


class DamagedRecord(Exception):
    """A record in the database is damaged; raised by code that reads it."""


class Database:
    """One process's access to the database in a folder. May be used from several threads."""

    def __init__(
        self,
        folder: Path,
        fill: Work[[], None],
        mend: Work[[], None],
        has_content: Callable[[], bool],
    ) -> None:
        """`fill` puts what the sidecars say into new tables, `mend` in the place of damaged
        records; `has_content` returns whether they say any.

        Does nothing until first used; makes the folder when something is written.
        """
        self._folder = folder
        self._fill = fill
        self._mend = mend
        self._has_content = has_content
        self._connection: sqlite3.Connection | None = None
        self._number = 0
        """Number of the open database; 0: one in memory, in place of one that is not there."""
        self._lock = threading.RLock()

    def path(self, number: int) -> Path:
        return self._folder / ("store.sqlite3" if number == 1 else f"store-{number}.sqlite3")

    def read(self, work: Work[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the result of `work`, run in a transaction. Raises StoreError."""
        return self._run(lambda connection: work(connection, *args, **kwargs), is_writing=False)

    def write(self, work: Work[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the result of `work`, run in a transaction: all it did is on disk, or none of it.

        It may be called again, after what was damaged has been made anew. Raises StoreError.
        """
        return self._run(lambda connection: work(connection, *args, **kwargs), is_writing=True)

    def close(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def _run(self, work: Work[[], T], is_writing: bool) -> T:
        damage: Exception | None = None
        with self._lock, translated(self._folder):
            for _ in range(_ATTEMPTS):
                try:
                    if isinstance(damage, DamagedRecord):
                        self._attempt(self._mend, is_writing=True)
                    return self._attempt(work, is_writing)
                except DamagedRecord as error:
                    damage = error
                except DamagedDatabase as error:
                    damage = error
                    log.error("%s is damaged (%s): making it anew", self.path(self._number), error)
                    self._make_next(self._number)
            raise StoreError(  # the disk itself cannot be relied on
                f"the database in {self._folder} is damaged again: {damage}; check the disk"
            )

    def _attempt(self, work: Work[[], T], is_writing: bool) -> T:
        if not self._newest():
            if not is_writing and not self._has_content():
                with closing(self._connect(":memory:")) as empty:
                    empty.executescript(SCHEMA)
                    return work(empty)
            self._make_next(0)
        with self._locked(fcntl.LOCK_SH):
            return self._transact(work, is_writing)

    def _transact(self, work: Work[[], T], is_writing: bool) -> T:
        try:
            return transact(self._opened(), work, is_writing)
        except UnicodeDecodeError as error:
            raise DamagedDatabase(f"text in it is none: {error}") from None
        except sqlite3.DatabaseError as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF in _DAMAGE_CODES:
                raise DamagedDatabase(str(error)) from None
            raise

    def _opened(self) -> sqlite3.Connection:
        """Connect to the newest database. Raises DamagedDatabase; StoreError for a newer one."""
        newest = self._newest()
        if self._connection is not None and self._number == newest:
            return self._connection
        self.close()
        self._number = newest
        _check_format(self.path(newest))
        connection = self._connect(str(self.path(newest)))
        try:
            connection.execute("PRAGMA synchronous = FULL")
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            is_own = _tables(connection) == _own_tables()
            if version > VERSION and not is_own:
                raise StoreError(
                    f"{self.path(newest)} has version {version} and this program knows {VERSION}: "
                    "a newer one has made it; use that, or another data_dir"
                )
            if version != VERSION:
                raise DamagedDatabase("it has no version of ours")
            if not is_own:
                raise DamagedDatabase("its tables are not as they were made")
            (verdict,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
            if verdict != "ok":
                raise DamagedDatabase(verdict)
        except BaseException:
            connection.close()
            raise
        self._connection = connection
        return connection

    def _connect(self, name: str) -> sqlite3.Connection:
        connection = sqlite3.connect(
            name, timeout=_BUSY_S, isolation_level=None, check_same_thread=False
        )
        connection.text_factory = bytes.decode  # its own calls bad UTF-8 an OperationalError
        return connection

    def _newest(self) -> int:
        """Return the number of the database in use; 0 if there is none."""
        if not self._folder.exists():
            return 0
        newest = 0
        for number in sorted(self._numbers()):
            if number > newest + _FARTHEST:
                break
            newest = number
        return newest

    def _numbers(self) -> Iterator[int]:
        for path in self._folder.iterdir():
            name = _NAME.fullmatch(path.name)
            if name and path.is_file():
                yield int(name[1] or 1)

    def _make_next(self, damaged: int) -> None:
        """Create the database after the one of this number, unless somebody else has."""
        self.close()
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with self._locked(fcntl.LOCK_EX):
            if self._newest() > damaged:
                return
            made = self._folder / "store.making"
            for left in self._folder.glob("store.making*"):  # by a crash, journals included
                if left.is_dir() and not left.is_symlink():
                    shutil.rmtree(left)
                else:
                    left.unlink(missing_ok=True)
            with closing(self._connect(str(made))) as connection:
                connection.executescript(SCHEMA)
                connection.execute("BEGIN")
                self._fill(connection)
                connection.execute("COMMIT")
                connection.execute("PRAGMA journal_mode = WAL")  # the file keeps this mode
            made.chmod(0o600)  # SQLite's files beside it get the same mode
            free = (path for path in map(self.path, count(damaged + 1)) if not path.exists())
            made.rename(next(free))  # a folder may have the next name
            sync_folder(self._folder)

    @contextmanager
    def _locked(self, kind: int) -> Iterator[None]:
        # For reading: a lock needs no more, and whoever may only read may then do that.
        file = os.open(self._folder / "store.lock", os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, kind)
            yield
        finally:
            os.close(file)


def transact(connection: sqlite3.Connection, work: Work[[], T], is_writing: bool) -> T:
    """Return the result of `work`: all that it did is in the database, or none of it."""
    connection.execute("BEGIN IMMEDIATE" if is_writing else "BEGIN")
    try:
        result = work(connection)
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    return result


def _check_format(path: Path) -> None:
    """Raise DamagedDatabase for a format that SQLite would take for a newer one's: it would then
    not write there, or not read."""
    with open_file(path) as file:
        header = file.read(_HEADER.size)
    if len(header) == _HEADER.size:  # else SQLite says that it is none
        writes, reads, tables = _HEADER.unpack(header)
        if max(writes, reads) > 2 or tables > 4:
            raise DamagedDatabase("its format is none of SQLite's")


def _tables(connection: sqlite3.Connection) -> list[tuple[str]]:
    """Return the SQL statements that made tables and indices."""
    wanted = "SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL ORDER BY sql"
    return connection.execute(wanted).fetchall()


@cache
def _own_tables() -> list[tuple[str]]:
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(SCHEMA)
        return _tables(connection)


@contextmanager
def translated(folder: Path) -> Iterator[None]:
    """Raise errors of the disk and of SQLite as StoreError, with what to do."""
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code == sqlite3.SQLITE_FULL or (code == sqlite3.SQLITE_IOERR and _is_full(folder)):
            raise full(folder) from None
        if code in {sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM}:
            raise _unwritable(folder, str(error)) from None
        if code in {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}:
            raise StoreError(f"other processes keep {folder} busy: try again later") from None
        raise StoreError(f"the database in {folder} failed: {error}") from error
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise full(folder) from None
        reason = error.strerror or str(error)
        if error.filename is not None:
            reason += f": {os.fsdecode(error.filename)}"
        if error.errno in {errno.EROFS, errno.EACCES, errno.EPERM}:
            raise _unwritable(folder, reason) from None
        raise StoreError(f"{folder} failed: {reason}") from error


def _is_full(folder: Path) -> bool:
    """Whether there is no room for the memory that SQLite's processes share, which is a file."""
    try:
        return shutil.disk_usage(folder).free < _SHARED_BYTES
    except OSError:
        return False


def full(folder: Path, spare_bytes: int = 0) -> StoreFull:
    """Return the error where fewer than `spare_bytes` are free; 0: none are."""
    spare = f"less than the {spare_bytes // 1024**2} MiB that must stay free"
    left = spare if spare_bytes else "no space"
    return StoreFull(f"{left} is left on the disk of {folder}: delete files, or add space")


def _unwritable(folder: Path, reason: str) -> StoreError:
    return StoreError(
        f"{folder} cannot be written ({reason}): let this user write there, or set data_dir"
    )


def sync_folder(folder: Path) -> None:
    """Make additions to a folder and renames in it durable."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
