"""Files of whole frames: .gz, whose members, and .zst, whose frames, may follow one another.

Knows bytes and nothing of lines.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import zstandard

from srm.server.commands.object_storage import Source

CHUNK = 1024 * 1024
MOST_MADE = 32 * 1024 * 1024
"""Most bytes that are made at once, whatever was compressed."""


class Codec(NamedTuple):
    """Functions that make and read a compressed frame."""

    compress: Callable[[bytes], bytes]
    """A whole frame, with a checksum; the same data makes the same bytes."""
    decompressor: Callable[[], Any]
    """Makes what reads one frame, as zlib does: `decompress`, `eof`, `unused_data`."""
    step: int
    """Bytes that are decompressed together: so few that the format cannot make more than MOST_MADE
    of them."""
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
        MOST_MADE // (4 * 258),  # a match has 258 bytes, and takes two bits
        b"\0",
    ),
    ".zst": Codec(
        lambda data: zstandard.ZstdCompressor(write_checksum=True).compress(data),
        lambda: zstandard.ZstdDecompressor().decompressobj(),
        MOST_MADE // (128 * 1024 // 4),  # a block has 128 KiB, and takes four bytes
        b"",
    ),
}
"""Codecs by the suffix of a file's name."""


def codec_of(path: Source) -> Codec | None:
    """Return the codec of a file by its name; None if it is not compressed."""
    return CODECS.get(path.suffix.lower())


def decompressed(chunks: Iterable[bytes], codec: Codec) -> Iterator[bytes]:
    """Yield the data of the frames as it comes, a CHUNK at most. Raises DamagedArchive, after what
    can be read."""
    for data, _ in find_frames(chunks, codec):
        for at in range(0, len(data), CHUNK):
            yield data[at : at + CHUNK]


def whole_size(file: int, codec: Codec) -> int:
    """Return the size in bytes of the whole frames that a file begins with."""
    size = 0
    try:
        for _, end in find_frames(chunks_of(file), codec):
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


def find_frames(chunks: Iterable[bytes], codec: Codec) -> Iterator[tuple[bytes, int | None]]:
    """Yield data, MOST_MADE and a CHUNK at most, and the offset where its frame ends, or None if
    the frame goes on."""
    reader = None
    read = 0
    for chunk in chunks:
        at, made, size = 0, [], 0
        while at < len(chunk):
            if reader is None:
                if codec.padding and chunk.startswith(codec.padding, at):
                    at = len(chunk) - len(chunk[at:].lstrip(codec.padding))
                    continue
                reader = codec.decompressor()
            step = chunk[at : at + codec.step]
            try:
                made.append(reader.decompress(step))
            except (zlib.error, zstandard.ZstdError) as error:
                yield b"".join(made), None
                raise DamagedArchive(str(error)) from None
            at += len(step)
            size += len(made[-1])
            end = None
            if reader.eof:
                at -= len(reader.unused_data)
                reader, end = None, read + at
            if end is not None or size >= CHUNK:
                yield b"".join(made), end
                made, size = [], 0
        yield b"".join(made), None
        read += len(chunk)
    if reader is not None:
        raise DamagedArchive("it ends in the middle", is_cut=True)
