"""Small JSON files beside files and batches that say what the database says of them.

A database that is lost is made again from these, and a record in it that is damaged. Each is
written whole or not at all, and before the transaction it belongs to is complete: they are never
behind it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path

from srm.errors import UNDECODABLE
from srm.files import read_file
from srm.server.storage.database import sync_folder
from srm.server.storage.records import (
    BatchRecord,
    FileRecord,
    Record,
    decode,
    encode,
    is_batch_id,
    is_file_id,
)

log = logging.getLogger(__name__)

_SUFFIX = ".json"
_ASIDE = ".damaged"
"""What a sidecar that cannot be read is called, so that it is found, and logged once."""


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
                file.write(encode(record))
                file.flush()
                os.fsync(file.fileno())
            made.rename(path)
        except OSError:
            made.unlink(missing_ok=True)
            raise
        sync_folder(folder)

    def has_file(self, id: str) -> bool:
        """Return whether a file has a sidecar, or one that was set aside."""
        folder = self._folders[FileRecord]
        return any((folder / (id + suffix)).exists() for suffix in (_SUFFIX, _ASIDE))

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

    def get(self, kind: type[Record], id: str) -> Record | None:
        """Return a record; None if there is none. Raises OSError, and one of UNDECODABLE if it is
        damaged."""
        try:
            record = decode(read_file(self._folders[kind] / (id + _SUFFIX)), kind)
        except FileNotFoundError:
            return None
        if record.id != id:
            raise ValueError(f"it is that of {record.id}")
        return record

    def is_whole(self, record: FileRecord | BatchRecord) -> bool:
        """Return whether a record's sidecar is there and not damaged. Raises OSError."""
        try:
            return self.get(type(record), record.id) is not None
        except UNDECODABLE:
            return False

    def read(self, kind: type[Record], ids: Iterable[str]) -> list[Record]:
        """Return these records, oldest first, but for files whose bytes are not there. What is
        damaged is set aside: nothing has it any more."""
        records = []
        for id in ids:
            path = self._folders[kind] / (id + _SUFFIX)
            if kind is FileRecord and not path.with_suffix("").exists():
                continue
            try:
                record = self.get(kind, id)
            except OSError as error:
                log.error("%s is left out: %s", path, error)
            except UNDECODABLE as error:
                log.error("%s is left out, and set aside as %s: %s", path, id + _ASIDE, error)
                path.rename(path.with_suffix(_ASIDE))
            else:
                records += [record] if record is not None else []
        return sorted(records, key=lambda record: (record.created_at, record.id))
