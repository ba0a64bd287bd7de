"""Small JSON files beside files and batches that say what the database says of them.

A database that is lost is made again from these. Each is written whole or not at all, and before
the transaction it belongs to is complete: they are never behind it. Knows no database.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

import msgspec

from engine.errors import UNDECODABLE
from server.storage.database import sync_folder
from server.storage.records import BatchRecord, FileRecord, is_batch_id, is_file_id

log = logging.getLogger(__name__)

_SUFFIX = ".json"
Record = TypeVar("Record", FileRecord, BatchRecord)


class Sidecars:
    """The sidecars of one folder: `files/<id>.json` and `batches/<id>.json`."""

    def __init__(self, folder: Path) -> None:
        self._folders: dict[type, Path] = {
            FileRecord: folder / "files",
            BatchRecord: folder / "batches",
        }

    def has_any(self) -> bool:
        return any(folder.exists() for folder in self._folders.values())

    def write(self, record: FileRecord | BatchRecord) -> None:
        """Write a record, in place of any of the same id."""
        folder = self._folders[type(record)]
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
        return (self._folders[FileRecord] / (id + _SUFFIX)).exists()

    def remove(self, kind: type[FileRecord | BatchRecord], id: str) -> None:
        """Remove the sidecar of a file, or of a batch that could not be added."""
        folder = self._folders[kind]
        if folder.exists():
            (folder / (id + _SUFFIX)).unlink(missing_ok=True)
            sync_folder(folder)

    def ids(self, kind: type[FileRecord | BatchRecord]) -> list[str]:
        """Return the ids of all files, or of all batches, that have a sidecar."""
        folder = self._folders[kind]
        names = (path.name for path in folder.iterdir()) if folder.exists() else ()
        ids = (name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX))
        is_id = is_file_id if kind is FileRecord else is_batch_id
        return [id for id in ids if is_id(id)]

    def read(self, kind: type[Record], ids: Iterable[str]) -> list[Record]:
        """Return these records, oldest first, but for files whose bytes are not there."""
        found = []
        for id in ids:
            path = self._folders[kind] / (id + _SUFFIX)
            if kind is FileRecord and not path.with_suffix("").exists():
                continue
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
