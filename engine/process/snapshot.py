"""The snapshot file, which holds the progress of durable requests: its layout, and reading it.

Layout, little-endian: a preamble that says where the header is; chunks of many requests' sequences,
a section for each of their arrays; the header, with the index of requests and the checksum of every
section. Every byte is under a checksum. A section's is verified when the first request of its chunk
is asked for, so that opening costs the index alone, and a request costs its own rows.
"""

from __future__ import annotations

import hashlib
import os
import struct
import zlib
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from srm.engine.messages import Request
from srm.engine.state.parked import Parked, latest
from srm.engine.steps.batch import I32, I64, SlotStates
from srm.errors import UNDECODABLE, SnapshotError
from srm.files import open_file

NAME = "durable.snapshot"  # name of the file in its folder
FORMAT_VERSION = 1
MAGIC = b"SRMSNAP\n"
PREAMBLE = struct.Struct("<8sQQII")  # magic, header's offset, its length, its crc, crc of these
_DIGEST_SIZE = 16
_PIECE = 2**23  # bytes read at once where a section is only checked
encoder = msgspec.msgpack.Encoder()


class Stamp(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The conditions under which sequences can go on: another value of any gives other tokens."""

    fingerprint: str  # fingerprint of config and weights, hexadecimal
    arithmetic: str  # as the engine's `Status` has it
    state_width: int  # values of a sequence's state
    state_dtype: str  # dtype of these values, as numpy writes it


class SnapshotChunk(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Location of some sequences: consecutive sections, in the order of SECTIONS."""

    offset: int
    rows: int
    sizes: list[int]
    checksums: list[int]

    def begin(self, section: str) -> int:
        return self.offset + sum(self.sizes[: SECTIONS.index(section)])

    def size(self, section: str) -> int:
        return self.sizes[SECTIONS.index(section)]


SECTIONS = (
    "states",  # of the stamp's dtype [rows, state_width]
    "last_tokens",  # i32[rows]
    "indices",  # i64[rows]
    "positions",  # i32[rows]
    "token_counts",  # i32[rows]
    "logprob_counts",  # i32[rows] as many, or 0 where nobody asked
    "tokens",  # i32[sum of token_counts]
    "logprobs",  # f32[sum of logprob_counts]
)


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format_version: int
    stamp: Stamp
    weights_version: int  # version of the weights in use; for information only
    created_unix: float
    num_sequences: int
    ids: list[str]
    """Id of each record's request; of several records that have a sample the last is right."""
    digests: bytes  # u8[records, _DIGEST_SIZE]
    places: bytes  # i32[records, 3]: chunk, first row there, rows
    chunks: list[SnapshotChunk]


class SnapshotFile:
    """A snapshot to go on from. Keeps the file open, so that the next one may take its place."""

    def __init__(self, path: Path, stamp: Stamp) -> None:
        """Raises FileNotFoundError, and SnapshotError if it is damaged or of another stamp."""
        self.path = path
        self._stamp = stamp
        with open_file(path) as opened:
            self._file = os.dup(opened.fileno())
        self._loaded: dict[int, _LoadedChunk] = {}  # chunks whose checksums are right
        try:
            self.header = self._read_header()
            self._check_stamp()
        except BaseException:
            os.close(self._file)
            raise
        self._records: defaultdict[str, list[int]] = defaultdict(list)
        for at, request_id in enumerate(self.header.ids):
            self._records[request_id].append(at)
        self._places = np.frombuffer(self.header.places, "<i4").reshape(-1, 3)

    def progress(self, request: Request) -> Parked | None:
        """Return the progress of this request; None where there is none of the same id, prompt and
        parameters. Raises SnapshotError if that part of the file is damaged."""
        if request.id not in self._records:
            return None
        wanted = digest(request)
        parts = [self._part(at) for at in self._records[request.id] if self._digest(at) == wanted]
        return latest(parts) if parts else None

    def close(self) -> None:
        os.close(self._file)

    def _digest(self, at: int) -> bytes:
        return self.header.digests[at * _DIGEST_SIZE : (at + 1) * _DIGEST_SIZE]

    def _part(self, at: int) -> Parked:
        number, begin, count = self._places[at].tolist()
        chunk = self.header.chunks[number]
        loaded = self._loaded.get(number) or self._load(number)
        end, width = begin + count, self._stamp.state_width
        row_bytes = width * np.dtype(self._stamp.state_dtype).itemsize
        states = self._read(chunk.begin("states") + begin * row_bytes, count * row_bytes)
        return Parked(
            loaded.indices[begin:end],
            loaded.positions[begin:end],
            SlotStates(
                np.frombuffer(states, self._stamp.state_dtype).reshape(count, width),
                loaded.last_tokens[begin:end],
            ),
            self._split(chunk.begin("tokens"), loaded.token_ends[begin : end + 1]),
            self._split(chunk.begin("logprobs"), loaded.logprob_ends[begin : end + 1]),
        )

    def _read_header(self) -> Header:
        preamble = self._read(0, PREAMBLE.size)
        magic, offset, length, checksum, own = PREAMBLE.unpack(preamble)
        if magic != MAGIC:
            raise self._refused("magic", magic, MAGIC)
        self._check("preamble", zlib.crc32(preamble[:-4]), own)
        size = os.fstat(self._file).st_size
        if size != offset + length:
            raise self._refused("size in bytes", size, offset + length)
        data = self._read(offset, length)
        self._check("header", zlib.crc32(data), checksum)
        try:
            version = msgspec.msgpack.decode(data, type=_Versioned).format_version
            if version != FORMAT_VERSION:
                raise self._refused("format_version", version, FORMAT_VERSION)
            return msgspec.msgpack.decode(data, type=Header)
        except UNDECODABLE as error:
            raise SnapshotError(f"{self.path}: header is none: {error}") from None

    def _check_stamp(self) -> None:
        for name in Stamp.__struct_fields__:
            actual, expected = getattr(self.header.stamp, name), getattr(self._stamp, name)
            if actual != expected:
                raise self._refused(name, actual, expected)

    def _load(self, number: int) -> _LoadedChunk:
        """Verify all of a chunk's checksums; keep its small arrays."""
        chunk = self.header.chunks[number]
        for section, size, checksum in zip(SECTIONS, chunk.sizes, chunk.checksums, strict=True):
            begin, actual = chunk.begin(section), 0
            for at in range(begin, begin + size, _PIECE):
                actual = zlib.crc32(self._read(at, min(_PIECE, begin + size - at)), actual)
            self._check(f"checksum of {section} in chunk {number}", actual, checksum)

        def array(section: str, kind: str) -> npt.NDArray[Any]:
            return np.frombuffer(self._read(chunk.begin(section), chunk.size(section)), kind)

        loaded = self._loaded[number] = _LoadedChunk(
            array("indices", "<i8"),
            array("positions", "<i4"),
            array("last_tokens", "<i4"),
            np.append(0, 4 * np.cumsum(array("token_counts", "<i4"), dtype=np.int64)),
            np.append(0, 4 * np.cumsum(array("logprob_counts", "<i4"), dtype=np.int64)),
        )
        return loaded

    def _split(self, begin: int, ends: I64) -> tuple[bytes, ...]:
        first = int(ends[0])
        data = self._read(begin + first, int(ends[-1]) - first)
        edges = (ends - first).tolist()
        return tuple(data[a:b] for a, b in pairwise(edges))

    def _read(self, offset: int, size: int) -> bytes:
        parts, left = [], size
        while left:
            try:
                parts.append(os.pread(self._file, left, offset + size - left))
            except OSError as error:
                raise SnapshotError(f"{self.path}: cannot be read: {error.strerror}") from None
            if not parts[-1]:
                raise self._refused(f"bytes from {offset} on", size - left, size)
            left -= len(parts[-1])
        return b"".join(parts) if len(parts) > 1 else (parts or [b""])[0]

    def _check(self, field: str, actual: int, expected: int) -> None:
        if actual != expected:
            raise self._refused(field, f"{actual:08x}", f"{expected:08x}")

    def _refused(self, field: str, actual: object, expected: object) -> SnapshotError:
        return SnapshotError(f"{self.path}: {field} is {actual}, expected {expected}")


class _Versioned(msgspec.Struct):
    """The field that a header of any version has."""

    format_version: int


class _LoadedChunk(NamedTuple):
    """The small arrays of a chunk that has been verified."""

    indices: I64  # i64[rows]
    positions: I32  # i32[rows]
    last_tokens: I32  # i32[rows]
    token_ends: I64  # i64[rows + 1] where each row's tokens begin and end, in bytes
    logprob_ends: I64  # i64[rows + 1]


def digest(request: Request) -> bytes:
    """Return a digest of prompt, parameters and samples: with the model they determine tokens."""
    known = hashlib.blake2b(request.prompt_token_ids, digest_size=_DIGEST_SIZE)
    biases = dict(sorted(request.params.logit_bias.items()))  # whatever order they came in
    known.update(encoder.encode(msgspec.structs.replace(request.params, logit_bias=biases)))
    known.update(request.samples)
    return known.digest()
