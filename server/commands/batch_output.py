"""Outputs of `srm batch`: files of whole lines, frames or members at any moment, and streams.

Knows bytes and lines, and nothing of what they say.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

from srm.errors import ConfigError
from srm.files import open_file
from srm.server.batch.part_file import PartFile
from srm.server.commands.compression import (
    Codec,
    DamagedArchive,
    chunks_of,
    codec_of,
    decompressed,
    whole_size,
)


def open_part(path: Path) -> PartFile:
    """Open a file for results. Raises ConfigError, also if another process is writing it."""
    try:
        path.touch()  # with the permissions that files are made with here
        codec = codec_of(path)
        return LinesFile(path) if codec is None else FrameFile(path, codec)
    except OSError as error:
        raise ConfigError(f"output = {path}: {error.strerror}") from None


class LinesFile(PartFile):
    """A PartFile that is locked against other processes."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._file)
            raise ConfigError(f"output = {path} is being written by another process") from None


class FrameFile(LinesFile):
    """A LinesFile to which each `sync` adds one compressed frame."""

    def __init__(self, path: Path, codec: Codec) -> None:
        super().__init__(path)
        self._codec = codec

    def recover(self, accepts: Callable[[bytes], bool]) -> int:
        """Cut the file behind its last whole frame, and pass each line to `accepts`, which must
        take it or raise. Returns how many bytes were cut. Raises ConfigError if the frames are not
        whole lines."""
        cut = self._cut(whole_size(self._file, self._codec))
        rest = b""
        for data in decompressed(chunks_of(self._file), self._codec):
            *whole, rest = (rest + data).split(b"\n")
            if not all(map(accepts, whole)):
                break
        if rest:
            raise ConfigError(f"output = {self.path} does not hold whole lines of results")
        return cut

    def _write(self, data: bytes) -> None:
        super()._write(self._codec.compress(data))

    def _whole(self, _data: bytes) -> int:
        return 0  # a frame is there whole, or all of it is tried again


class StreamPart(PartFile):
    """Standard output, or a file that is a pipe: written once, and never read again."""

    def __init__(self, file: int, on_broken: Callable[[], object]) -> None:
        """`on_broken` is called, in any thread, when nobody reads it any more."""
        super().__init__(Path("standard output"), file)
        self._synced_size = 0  # whatever is there already
        self._sent = 0  # of the bytes to be written next
        self._on_broken = on_broken

    def recover(self, _accepts: Callable[[bytes], bool]) -> int:
        """Recover nothing: a stream cannot be read."""
        return 0

    def _write(self, data: bytes) -> None:
        try:
            while self._sent < len(data):
                end = self._sent + 64 * 1024
                self._sent += os.write(self._file, memoryview(data)[self._sent : end])
        except BrokenPipeError:
            self._on_broken()
        self._sent = 0

    def close(self) -> None:
        """Leave the stream open: it is not ours to close."""


def beginning(path: Path) -> bytes:
    """Return the first bytes of the file, decompressed, even if it is cut short. Raises ConfigError
    for what cannot have been written here."""
    codec, data = codec_of(path), b""
    try:
        with open_file(path) as file:
            chunks = iter([file.read(64 * 1024)])
        data = next(chunks if codec is None else decompressed(chunks, codec), b"")
    except DamagedArchive as error:
        if not error.is_cut:
            raise ConfigError(f"output = {path} is no file of results: {error}") from None
    return data[:512]
