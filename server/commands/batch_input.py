"""The input of `srm batch`: lines of a file of any of our formats, or of standard input.

A line is one of OpenAI's batches, or a request's body as it is; rows of a Parquet file become such
lines.
"""

from __future__ import annotations

import logging
import os
import select
import stat
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import BinaryIO, cast

import msgspec
from msgspec import Raw

from srm.errors import UNDECODABLE, ConfigError
from srm.server.batch.job_input import duplicates
from srm.server.batch.lines import BatchLine, RawLine, custom_id_of, parse_line, read_lines
from srm.server.commands.batch_parquet import is_parquet, read_rows
from srm.server.commands.compression import CHUNK, DamagedArchive, codec_of, decompressed
from srm.server.commands.object_storage import Source, StoredObject
from srm.server.schema.json_parts import MAX_FIELDS, TooManyFields, fields_of
from srm.server.schema.validation import not_null
from srm.server.storage.records import LineError

log = logging.getLogger(__name__)

STANDARD = Path("-")
_SHOWN_S = 10.0
"""Seconds after which a long look through a file says how far it is."""
_LOOK_S = 0.2
"""Seconds between two checks whether standard input is still wanted, while waiting for it."""
_LINE_FIELDS = {"custom_id", "method", "url", "body"}
_encode = msgspec.json.Encoder().encode


@dataclass
class Input:
    """Lines to be answered."""

    lines: Iterator[list[RawLine]]
    """Raises ConfigError where the file cannot be read any further."""
    again: Callable[[], Iterator[list[RawLine]]] | None
    """Reads the lines once more, of rows only `custom_id`; None if they can be read only once."""
    close: Callable[[], None] = lambda: None
    """Ends the wait for input that does not come."""


def peek(lines: Iterator[list[RawLine]]) -> tuple[bytes, Iterator[list[RawLine]]]:
    """Return the first line, and an iterator over all of them."""
    taken: list[list[RawLine]] = []
    for some in lines:
        taken.append(some)
        if some:
            return some[0][1] or b"", chain(taken, lines)
    return b"", iter(taken)


def open_input(path: Source, max_line_bytes: int) -> Input:
    """Open a file by its name; - is standard input. Raises ConfigError."""
    if path == STANDARD and (sys.stdin is None or sys.stdin.isatty()):
        raise ConfigError("input is missing: srm batch FILE")
    try:
        if isinstance(path, Path) and (path == STANDARD or not stat.S_ISREG(path.stat().st_mode)):
            # It can be read only once, and may block.
            is_standard, closed = path == STANDARD, threading.Event()
            file = sys.stdin.fileno() if is_standard else os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            lines = _lines(path, _available(file, closed), max_line_bytes)
            return Input(lines, None, closed.set)
        with path.open("rb"):
            pass
    except OSError as error:
        raise ConfigError(f"input = {path}: {error.strerror or error}") from None

    def read(only: str = "") -> Iterator[list[RawLine]]:
        if is_parquet(path):
            return _readable(path, read_rows(path, max_line_bytes, only))
        return _lines(path, _raw_chunks(path), max_line_bytes)

    # An object would be downloaded twice.
    again = None if isinstance(path, StoredObject) else partial(read, "custom_id")
    return Input(read(), again)


def check_custom_ids(
    source: Input, path: Source, clock: Callable[[], float] = time.monotonic
) -> int | None:
    """Return the number of the last line; None if the lines can be read only once. Raises
    ConfigError if two lines have one custom_id."""
    if (again := source.again) is None:
        return None
    last, hashes, shown_at = 0, array("q"), clock()
    for last, raw in chain.from_iterable(again()):
        if (name := custom_id(raw, last)) is not None:
            hashes.append(hash(name))
        if (now := clock()) - shown_at >= _SHOWN_S:
            shown_at = now
            log.info("looked through %s lines for custom_ids that are given twice", f"{last:,}")
    for error in duplicates(hashes, lambda: chain.from_iterable(again()), parse):
        raise ConfigError(f"input = {path}: line {error.line}: {error.message}")
    return last


def _lines(path: Source, raw: Iterator[bytes], max_line_bytes: int) -> Iterator[list[RawLine]]:
    file = _Stream(_plain(path, raw))
    return _readable(path, read_lines(cast(BinaryIO, file), max_line_bytes))


def parse(raw: bytes | None, number: int) -> BatchLine | LineError:
    """Parse a batch line, or the bare body of a request. `custom_id` is the line's number if none
    is given; a body with messages is a chat request, and one with input is that of a response."""
    try:
        if raw is not None and not raw.isascii():
            raw.decode()
        fields = not_null(fields_of(raw or b""))
    except TooManyFields:
        message = f"a line must have at most {MAX_FIELDS} fields"
        return LineError(code="too_many_fields", message=message, line=number)
    except UNDECODABLE:
        return parse_line(raw, number)  # which says what is wrong
    if fields.keys() >= _LINE_FIELDS:
        return parse_line(raw, number)
    custom_id = fields.pop("custom_id", Raw(_encode(str(number))))
    if "body" not in fields:
        fields = {"body": Raw(_encode(fields))}
    route = {"method": "POST", "url": _url_of(fields["body"]), "custom_id": custom_id}
    return parse_line(_encode(route | fields), number)


def custom_id(raw: bytes | None, number: int) -> str | None:
    """Return the custom_id of a line; None if it has none that is valid."""
    try:
        given = _decode_named(raw or b"").custom_id
    except UNDECODABLE:
        return None
    return custom_id_of(number if given is None else given)


def _url_of(body: Raw) -> str:
    """Return the route whose body it is, by a field that the others lack."""
    data = bytes(body)
    for name, url in (("messages", "/v1/chat/completions"), ("input", "/v1/responses")):
        try:
            if f'"{name}"'.encode() in data and name in fields_of(body):
                return url
        except UNDECODABLE:
            break
    return "/v1/completions"


class _Named(msgspec.Struct):
    """The only field of a line that its name needs."""

    custom_id: str | int | float | None = None


_decode_named = msgspec.json.Decoder(_Named).decode


class _Stream:
    """The part of a file object that `read_lines` needs: returns chunks as they come."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks

    def read(self, _size: int) -> bytes:
        return next(self._chunks, b"")


def _readable(path: Source, lines: Iterator[list[RawLine]]) -> Iterator[list[RawLine]]:
    try:
        yield from lines
    except OSError as error:
        raise ConfigError(f"input = {path}: {error.strerror or error}") from None
    except DamagedArchive as error:
        raise ConfigError(f"input = {path}: {error}") from None


def _available(file: int, closed: threading.Event) -> Iterator[bytes]:
    """Yield what is available, so that whoever writes line by line is answered line by line."""
    while not closed.is_set():
        if select.select([file], [], [], _LOOK_S)[0]:
            if not (chunk := os.read(file, CHUNK)):
                return
            yield chunk


def _plain(path: Source, raw: Iterator[bytes]) -> Iterator[bytes]:
    """Decompress the bytes of a file if its name says that it is compressed."""
    codec = codec_of(path)
    return raw if codec is None else decompressed(raw, codec)


def _raw_chunks(path: Source) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            yield chunk
