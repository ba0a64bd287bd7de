"""Files of whole frames: .gz, whose members, and .zst, whose frames, may follow one another.

Knows bytes and nothing of lines.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import zstandard

from server.commands.object_storage import Source

CHUNK = 1024 * 1024


class Codec(NamedTuple):
    """Functions that make and read a compressed frame."""

    compress: Callable[[bytes], bytes]
    """A whole frame, with a checksum; the same data makes the same bytes."""
    decompressor: Callable[[], Any]
    """Makes what reads one frame, as zlib does: `decompress`, `eof`, `unused_data`."""
    padding: bytes
    """Bytes that may follow a frame and carry no data."""


class DamagedArchive(Exception):
    """The file ends inside a frame, or does not consist of frames."""

    def __init__(self, message: str, is_cut: bool = False) -> None:
        super().__init__(message)
        self.is_cut = is_cut


CODECS = {
    ".gz": Codec(
        lambda data: zlib.compress(data, 6, 16 + zlib.MAX_WBITS),
        lambda: zlib.decompressobj(16 + zlib.MAX_WBITS),
        b"\0",
    ),
    ".zst": Codec(
        lambda data: zstandard.ZstdCompressor(write_checksum=True).compress(data),
        lambda: zstandard.ZstdDecompressor().decompressobj(),
        b"",
    ),
}
"""Codecs by the suffix of a file's name."""


def codec_of(path: Source) -> Codec | None:
    """Return the codec of a file by its name; None if it is not compressed."""
    return CODECS.get(path.suffix.lower())


def decompressed(chunks: Iterable[bytes], codec: Codec) -> Iterator[bytes]:
    """Yield the data of the frames as it comes. Raises DamagedArchive, after what can be read."""
    for data, _ in _frames(chunks, codec):
        if data:
            yield data


def whole_size(file: int, codec: Codec) -> int:
    """Return the size in bytes of the whole frames that a file begins with."""
    size = 0
    try:
        for _, end in _frames(chunks_of(file), codec):
            size = size if end is None else end
    except DamagedArchive:
        pass  # behind the last whole frame
    return size


def chunks_of(file: int) -> Iterator[bytes]:
    """Yield the bytes of an open file from its beginning, wherever its cursor is."""
    at = 0
    while chunk := os.pread(file, CHUNK, at):
        at += len(chunk)
        yield chunk


def _frames(chunks: Iterable[bytes], codec: Codec) -> Iterator[tuple[bytes, int | None]]:
    """Yield data, and the offset where its frame ends, or None if the frame goes on."""
    reader = None
    read = 0
    for chunk in chunks:
        read += len(chunk)
        rest = chunk
        while rest:
            if reader is None:
                rest = rest.lstrip(codec.padding) if codec.padding else rest
                if not rest:
                    break
                reader = codec.decompressor()
            try:
                data = reader.decompress(rest)
            except (zlib.error, zstandard.ZstdError) as error:
                raise DamagedArchive(str(error)) from None
            if not reader.eof:
                yield data, None
                break
            rest, reader = reader.unused_data, None
            yield data, read - len(rest)
    if reader is not None:
        raise DamagedArchive("it ends in the middle", is_cut=True)
