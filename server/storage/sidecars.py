"""Small JSON files beside files and batches that say what the database says of them.

A database that is lost is made again from these. Each is written whole or not at all, and before
the transaction it belongs to is complete: they are never behind it. Knows no database.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import msgspec

from engine.errors import UNDECODABLE
from server.storage.database import sync_folder
from server.storage.records import BatchRecord, FileRecord, is_batch_id, is_file_id

log = logging.getLogger(__name__)

_SUFFIX = ".json"

_Record = TypeVar("_Record", FileRecord, BatchRecord)


class Sidecars:
    """The sidecars of one folder: `files/<id>.json` and `batches/<id>.json`."""

    def __init__(self, folder: Path) -> None:
        self._files = folder / "files"
        self._batches = folder / "batches"

    @property
    def has_any(self) -> bool:
        return self._files.exists() or self._batches.exists()

    def write(self, record: FileRecord | BatchRecord) -> None:
        """Write a record, in place of any of the same id."""
        folder = self._files if isinstance(record, FileRecord) else self._batches
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = folder / (record.id + _SUFFIX)
        made = folder / (record.id + ".making")
        try:
            with made.open("wb") as file:
                file.write(msgspec.json.encode(record))
                file.flush()
                os.fsync(file.fileno())
            made.rename(path)
        except OSError:
            made.unlink(missing_ok=True)
            raise
        sync_folder(folder)

    def has_file(self, id: str) -> bool:
        return (self._files / (id + _SUFFIX)).exists()

    def remove_file(self, id: str) -> None:
        """Remove the sidecar of a file."""
        _remove(self._files, id)

    def remove_batch(self, id: str) -> None:
        """Remove the sidecar of a batch that could not be added."""
        _remove(self._batches, id)

    def file_ids(self) -> list[str]:
        """Return the ids of all files that have a sidecar."""
        return _ids_in(self._files, is_file_id)

    def batch_ids(self) -> list[str]:
        return _ids_in(self._batches, is_batch_id)

    def files(self, ids: Iterable[str]) -> list[FileRecord]:
        """Return the records of those files whose bytes are there, oldest first."""
        return _read(self._files, [id for id in ids if (self._files / id).exists()], FileRecord)

    def batches(self, ids: Iterable[str]) -> list[BatchRecord]:
        """Return the records of these batches, oldest first."""
        return _read(self._batches, ids, BatchRecord)


def _remove(folder: Path, id: str) -> None:
    if folder.exists():
        (folder / (id + _SUFFIX)).unlink(missing_ok=True)
        sync_folder(folder)


def _ids_in(folder: Path, is_id: Callable[[str], bool]) -> list[str]:
    names = (path.name for path in folder.iterdir()) if folder.exists() else ()
    ids = (name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX))
    return [id for id in ids if is_id(id)]


def _read(folder: Path, ids: Iterable[str], kind: type[_Record]) -> list[_Record]:
    found = []
    for id in ids:
        path = folder / (id + _SUFFIX)
        try:
            record = msgspec.json.decode(path.read_bytes(), type=kind)
        except FileNotFoundError:  # deleted since
            continue
        except (OSError, *UNDECODABLE) as error:
            log.error("%s is left out: %s", path, error)
            continue
        if record.id == id:
            found.append(record)
    return sorted(found, key=lambda record: (record.created_at, record.id))
