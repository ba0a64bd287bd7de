"""Writing a snapshot: beside the old one, which stays until the new one is whole and on the disk.
Every failure raises SnapshotError, and nothing that was there is lost."""

from __future__ import annotations

import fcntl
import os
import struct
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from srm.engine.messages import Request
from srm.engine.process.snapshot import (
    FORMAT_VERSION,
    MAGIC,
    NAME,
    PREAMBLE,
    Header,
    SnapshotChunk,
    Stamp,
    digest,
    encoder,
)
from srm.engine.state.parked import Parked
from srm.errors import SnapshotError

PARTIAL = NAME + ".partial"
"""The file that is being written, or that a killed engine left: the next one writes over it."""

_PIECE = 2**20  # bytes of states put together at a time, about

Record = tuple[Request, Parked]  # a request and its progress


class SnapshotWriter:
    """Writes a snapshot into a folder, beside the old one until `finish` puts it in its place.

    Every method raises SnapshotError; then, or to give up, call `discard`: the old one stays.
    """

    def __init__(self, folder: Path, stamp: Stamp, weights_version: int = 1) -> None:
        """Creates the folder if there is none."""
        self.num_sequences = 0
        self.num_bytes = PREAMBLE.size
        self._folder, self._stamp = folder, stamp
        self._weights_version = weights_version
        self._partial = folder / PARTIAL
        self._records: list[tuple[str, bytes]] = []
        self._places: list[tuple[int, int, int]] = []
        self._chunks: list[SnapshotChunk] = []
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # Not truncated before it is ours: another engine may be writing it.
            self._file = os.open(self._partial, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise self._failed(error) from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._file, 0)
            os.lseek(self._file, PREAMBLE.size, os.SEEK_SET)
        except BlockingIOError:
            os.close(self._file)
            raise SnapshotError(f"{self._partial}: another engine is writing it") from None
        except OSError as error:
            os.close(self._file)
            raise self._failed(error) from None

    def add(self, records: Sequence[Record]) -> None:
        """Write the progress of some requests, at least one, as one chunk. A later record of a
        request adds samples, or replaces those that an earlier one has."""
        parts = [parked for _, parked in records]
        counts = [len(part) for part in parts]
        begins = np.cumsum([0, *counts]).tolist()
        number = len(self._chunks)
        self._records += [(request.id, digest(request)) for request, _ in records]
        self._places += [
            (number, begin, count) for begin, count in zip(begins, counts, strict=False)
        ]
        self.num_sequences += begins[-1]
        offset, sizes, checksums = self.num_bytes, [], []
        try:
            for section in _sections(parts, self._stamp.state_dtype):
                size = checksum = 0
                for piece in section:
                    checksum = zlib.crc32(piece, checksum)
                    size += self._write(piece)
                sizes.append(size)
                checksums.append(checksum)
        except OSError as error:
            raise self._failed(error) from None
        self._chunks.append(SnapshotChunk(offset, begins[-1], sizes, checksums))

    def finish(self) -> int:
        """Make it the folder's snapshot, safe from a loss of power; return its size in bytes."""
        header = encoder.encode(
            Header(
                format_version=FORMAT_VERSION,
                stamp=self._stamp,
                weights_version=self._weights_version,
                created_unix=time.time(),
                num_sequences=self.num_sequences,
                ids=[request_id for request_id, _ in self._records],
                digests=b"".join(record_digest for _, record_digest in self._records),
                places=np.array(self._places, "<i4").tobytes(),
                chunks=self._chunks,
            )
        )
        preamble = PREAMBLE.pack(MAGIC, self.num_bytes, len(header), zlib.crc32(header), 0)
        preamble = preamble[:-4] + struct.pack("<I", zlib.crc32(preamble[:-4]))
        try:
            self._write(header)
            os.pwrite(self._file, preamble, 0)
            os.fsync(self._file)
            self._partial.replace(self._folder / NAME)
            _sync_folder(self._folder)
        except OSError as error:
            raise self._failed(error) from None
        os.close(self._file)
        return self.num_bytes

    def discard(self) -> None:
        """Forget what was written."""
        try:
            self._partial.unlink(missing_ok=True)
        except OSError as error:  # a folder that is not to be written: nor was the file
            raise self._failed(error) from None
        finally:
            os.close(self._file)

    def _write(self, data: memoryview | bytes) -> int:
        size, left = len(data), memoryview(data)
        while left:
            left = left[os.write(self._file, left) :]
        self.num_bytes += size
        return size

    def _failed(self, error: OSError) -> SnapshotError:
        return SnapshotError(f"{self._partial}: cannot be written: {error.strerror or error}")


def _sections(parts: Sequence[Parked], state_dtype: str) -> Iterator[Iterable[memoryview]]:
    """Yield a chunk's sections in the order of SECTIONS, in pieces that fit a processor's cache."""
    tokens = [token for part in parts for token in part.tokens]
    logprobs = [logprob for part in parts for logprob in part.logprobs]
    yield _states(parts, state_dtype)
    yield [_raw(np.concatenate([part.states.last_tokens for part in parts]), "<i4")]
    yield [_raw(np.concatenate([part.indices for part in parts]), "<i8")]
    yield [_raw(np.concatenate([part.positions for part in parts]), "<i4")]
    yield [_raw(np.array([len(token) // 4 for token in tokens]), "<i4")]
    yield [_raw(np.array([len(logprob) // 4 for logprob in logprobs]), "<i4")]
    yield [memoryview(b"".join(tokens))]
    yield [memoryview(b"".join(logprobs))]


def _states(parts: Sequence[Parked], dtype: str) -> Iterator[memoryview]:
    waiting, size = [], 0
    for part in parts:
        waiting.append(part.states.states)
        size += part.states.states.nbytes
        if size >= _PIECE or part is parts[-1]:
            yield _raw(np.concatenate(waiting) if len(waiting) > 1 else waiting[0], dtype)
            waiting, size = [], 0


def _raw(array: npt.NDArray[Any], dtype: str) -> memoryview:
    return np.ascontiguousarray(array, dtype).reshape(-1).view(np.uint8).data


def _sync_folder(folder: Path) -> None:
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
