"""Counts how often the process that runs batches was started and a batch did not get on.

A batch that kills the process outright leaves no error behind, and would be run again for ever. So
each start is counted on disk before the batch runs.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Set
from contextlib import suppress
from pathlib import Path

import msgspec

from srm.errors import UNDECODABLE, StoreError
from srm.files import read_file, sealed, unsealed
from srm.server.storage.records import BatchRecord
from srm.server.storage.store import Store

log = logging.getLogger(__name__)

MAX_TOGETHER = 3
"""Starts without progress after which a batch is run alone: it may be what kills the process."""
MAX_ALONE = 10
"""Further starts, alone and without progress, after which the batch is given up."""


class _Count(msgspec.Struct):
    starts: int
    """Processes that began to run the batch when it was as far as this."""
    progress: str


_decode = msgspec.json.Decoder(dict[str, _Count]).decode


class Starts:
    """The counts of one model's batches, in a file that one process has at a time."""

    def __init__(self, file: Path, store: Store) -> None:
        """`file` is written here alone; `load` reads it, once it is this process's."""
        self._file = file
        self._store = store
        self._lock = threading.Lock()
        self._begun: set[str] = set()
        self._suspects: set[str] = set()
        self._counts: dict[str, _Count] = {}

    def load(self) -> None:
        """Read the counts of the processes before."""
        try:
            self._counts = _decode(unsealed(read_file(self._file)))
        except FileNotFoundError:
            return
        except (OSError, *UNDECODABLE) as error:
            log.warning("%s is left out: %s", self._file, error)
        counts = self._counts.items()
        self._suspects = {id for id, count in counts if count.starts >= MAX_TOGETHER}

    def suspects(self, records: Iterable[BatchRecord]) -> set[str]:
        """Return the ids of those batches that are to run alone, until they get on."""
        for record in records:
            id = record.id
            count = self._counts.get(id)
            if id in self._suspects and count and count.progress != self._progress(record):
                self.clear(id)
        return self._suspects & {record.id for record in records}

    def is_hopeless(self, id: str) -> bool:
        """Return whether a batch that has begun had all its starts before."""
        count = self._counts.get(id)
        return (
            id in self._suspects and count is not None and count.starts > MAX_TOGETHER + MAX_ALONE
        )

    def begin(self, records: Iterable[BatchRecord], unfinished: Set[str]) -> None:
        """Count a start of batches before they run, one for this process; forget the counts of
        batches whose ids are not in `unfinished`."""
        self._suspects.intersection_update(unfinished)
        for id in self._counts.keys() - unfinished:
            self._counts.pop(id, None)
        for record in records:
            if record.id not in self._begun:
                self._begun.add(record.id)
                count, progress = self._counts.get(record.id), self._progress(record)
                before = count.starts if count is not None and count.progress == progress else 0
                self._counts[record.id] = _Count(before + 1, progress)
        self._write()

    def clear(self, id: str) -> None:
        """Forget the starts of a batch that got on, or ended without ending the process."""
        self._suspects.discard(id)
        self._begun.discard(id)  # if it is begun again, that counts
        if self._counts.pop(id, None) is not None:
            self._write()

    def take_back(self) -> None:
        """Take back this process's starts, since nothing kills it: it is asked to stop."""
        if begun := self._begun & self._counts.keys():
            for id in begun:
                self._counts[id].starts -= 1
            self._write()

    def _progress(self, record: BatchRecord) -> str:
        ids = [id for id in (record.output_file_id, record.error_file_id) if id]
        size = 0
        for id in ids:
            with suppress(OSError, StoreError):  # not there yet, or unreadable: running it says so
                size += self._store.path_of(id).stat().st_size
        return f"{record.status} {size}"

    def _write(self) -> None:
        made = self._file.with_suffix(".making")
        try:
            with self._lock:
                made.write_bytes(sealed(msgspec.json.encode(self._counts)))
                made.rename(self._file)  # there whole, wherever the process is killed
        except OSError as error:
            log.warning("%s cannot be written: %s", self._file, error.strerror)
