"""One line of a batch: from JSON to a request, and from its answer to a line of a result file.

The shapes are OpenAI's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Annotated, BinaryIO, NamedTuple, Protocol, get_args

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from srm.errors import (
    MAX_MESSAGE,
    MAX_PARAM,
    UNDECODABLE,
    IdInUse,
    Overloaded,
    RequestError,
    SRMError,
    TimedOut,
    cut,
    not_json_line,
)
from srm.server.errors import INTERNAL, body_of, status_of
from srm.server.generation.engine_request import RequestOwner
from srm.server.http.responses import escape_line_ends
from srm.server.schema.json_parts import TooManyFields, count_items, fields_of
from srm.server.storage.records import LineError, Url

URLS: tuple[Url, ...] = get_args(Url)
"""URLs that a line may request."""
MAX_CUSTOM_ID = 512
MAX_LINES = 10**10
"""Bound on the number of a line, each of which takes a bit of memory."""
_CHUNK = 256 * 1024
_BOM = b"\xef\xbb\xbf"
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_EXPONENT, _DIGITS = re.compile(rb"[eE]\+?[0-9]{3}"), re.compile(rb"[0-9]{200}")
_LARGE = re.compile(
    rb"(?<![0-9.eE+-])-?"
    rb"(?:[0-9]{200}|[0-9]++(?:\.[0-9]++)?+[eE]\+?[0-9]{3})[0-9.eE+-]*+"
)
"""Matches numbers, whole, of JSON without strings, of those that may be too large for a double."""
_SPARE_LEVELS = 100
_SHOWN = 80
"""Most characters of a number in an error."""
_NUMBER = re.compile(r"_([1-9][0-9]{0,9})\Z")
_FIELD = re.compile(r"field `([^`]*)`")
_SHAPE = re.compile(r"got `([^`]*)`(?: - at `\$\.([^`]*)`)?$")

RawLine = tuple[int, bytes | None]
"""A line's number in its file, counted from 1, and its bytes; None for a line that is too long."""


class BatchLine(NamedTuple):
    """A valid line, ready to be sent."""

    number: int
    custom_id: str
    method: str
    url: str
    body: bytes
    size: int
    """Approximate number of sequences it takes; 1 if the body does not say."""


_Count = Annotated[int, Meta(ge=0, le=2**53)]


class LineUsage(msgspec.Struct, frozen=True):
    """Tokens of a line, or of many."""

    prompt_tokens: int
    completion_tokens: int


NO_USAGE = LineUsage(0, 0)


class LineResult(NamedTuple):
    """The result of a line that has ended."""

    number: int
    record: bytes
    """Its line in the result file, without the newline."""
    is_failed: bool
    usage: LineUsage = NO_USAGE


class Answerer(Protocol):
    """Answers the bodies of requests to one URL."""

    async def answer_whole(self, body: bytes, id: str, owner: RequestOwner) -> bytes:
        """Return the whole reply. Raises SRMError."""


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    custom_id: str | int | float
    method: str
    url: str
    body: Raw


class _Size(msgspec.Struct):
    """The fields of a body that say how many sequences it takes."""

    n: int | None = None
    best_of: int | None = None
    prompt: Raw = Raw(b"")


class _Response(msgspec.Struct):
    status_code: int
    request_id: str
    body: Raw


class _Error(msgspec.Struct):
    code: str
    message: str


class _Record(msgspec.Struct):
    """A line of an output or error file."""

    id: str
    custom_id: str | None
    response: _Response | None
    error: _Error | None = None


class _Usage(msgspec.Struct):
    """Of a completion or a chat, or with other names of a response."""

    prompt_tokens: _Count | UnsetType = UNSET
    completion_tokens: _Count | UnsetType = UNSET
    input_tokens: _Count | UnsetType = UNSET
    output_tokens: _Count | UnsetType = UNSET

    def __post_init__(self) -> None:
        _ = self.of_line

    @property
    def of_line(self) -> LineUsage:
        """Raises ValueError where a number is missing."""
        for read, sampled in (
            (self.prompt_tokens, self.completion_tokens),
            (self.input_tokens, self.output_tokens),
        ):
            if read is not UNSET and sampled is not UNSET:
                return LineUsage(read, sampled)
        raise ValueError("a number of tokens is missing")


class _UsedBody(msgspec.Struct):
    usage: _Usage | None = None

    @property
    def of_line(self) -> LineUsage:
        return NO_USAGE if self.usage is None else self.usage.of_line


class _UsedResponse(msgspec.Struct):
    status_code: int
    request_id: str
    body: _UsedBody


class _Kept(msgspec.Struct):
    """The fields of a record that are counted."""

    id: str
    custom_id: str | None
    response: _UsedResponse | None
    error: _Error | None


_decode_line = msgspec.json.Decoder(_Line).decode
_decode_size = msgspec.json.Decoder(_Size).decode
_decode_used = msgspec.json.Decoder(_UsedBody).decode
_decode_kept = msgspec.json.Decoder(_Kept).decode
_encode = msgspec.json.Encoder().encode


def read_lines(file: BinaryIO, max_line_bytes: int) -> Iterator[list[RawLine]]:
    """Yield groups of a file's non-blank lines, without their newlines.

    Holds at most a chunk and one line, whatever the file.
    """
    number, rest, is_skipping = 0, b"", False
    for chunk in chain(iter(lambda: file.read(_CHUNK), b""), [b"\n"]):  # the last line may lack it
        *whole, rest = (rest + chunk).split(b"\n")
        if whole and not number:
            whole[0] = whole[0].removeprefix(_BOM)
        lines: list[RawLine] = []
        for line in whole:
            number += 1
            if is_skipping:  # the end of one that is too long
                is_skipping = False
            elif len(line) > max_line_bytes:
                lines.append((number, None))
            elif line and not line.isspace():
                lines.append((number, line))
        if len(rest) > max_line_bytes:
            if not is_skipping:
                lines.append((number + 1, None))
            rest, is_skipping = b"", True
        if is_skipping:
            rest = b""
        yield lines


def parse_line(raw: bytes | None, number: int, endpoint: str = "") -> BatchLine | LineError:
    """Parse a line of an input file; `endpoint`, if given, is the URL that it must have."""
    if raw is None:
        return _error("line_too_long", number, "This line is longer than a body may be")
    try:
        if not raw.isascii():
            raw.decode()  # of what nobody reads, too
        line = _decode_line(raw)
    except UNDECODABLE as error:
        if fault := not_json_line(raw):
            return _error("invalid_json_line", number, f"This line is not JSON: {fault}")
        return _shape_error(str(error), number)
    if (custom_id := custom_id_of(line.custom_id)) is None:
        message = f"custom_id must be a string or a whole number; got {line.custom_id}"
        return _error("invalid_custom_id", number, message, "custom_id")
    if not 1 <= len(custom_id) <= MAX_CUSTOM_ID:
        message = f"custom_id must have 1 … {MAX_CUSTOM_ID} characters, got {len(custom_id)}"
        return _error("invalid_custom_id", number, message, "custom_id")
    if line.method != "POST":
        message = f"method must be POST, got {line.method[:20]!r}"
        return _error("invalid_method", number, message, "method")
    if line.url not in ((endpoint,) if endpoint else URLS):
        wanted = f"the batch's endpoint, {endpoint}" if endpoint else " or ".join(URLS)
        message = f"url must be {wanted}, got {line.url[:100]!r}"
        return _error("url_mismatch", number, message, "url")
    body = bytes(line.body)
    if body[:1] != b"{":
        return _error("invalid_type", number, "body must be an object", "body")
    if _nests_too_deep(body):
        return _error("invalid_json_line", number, "body nests too deep to be read", "body")
    if large := _infinite_number(body):
        try:
            fields = fields_of(body).items()
        except TooManyFields:
            fields = {}.items()
        name = next((name for name, value in fields if _infinite_number(bytes(value))), "body")
        message = f"{cut(name, _SHOWN)} has {cut(large, _SHOWN)}, beyond what a double holds"
        return _error("invalid_json_line", number, message, name)
    return BatchLine(number, custom_id, line.method, line.url, body, _size(body))


def _nests_too_deep(body: bytes) -> bool:
    """Whether what answers the line might not read it: how deep that can depends on the calls that
    it is in, which are more there."""
    if body.count(b"[") + body.count(b"{") <= _SPARE_LEVELS:
        return False
    try:
        msgspec.json.decode(b"[" * _SPARE_LEVELS + body + b"]" * _SPARE_LEVELS, type=Raw)
    except RecursionError:
        return True
    return False


def _infinite_number(body: bytes) -> str:
    """Return a number of valid JSON that no double holds, or nothing: a decoder that leaves values
    undecoded does not look at numbers."""
    if _EXPONENT.search(body) or _DIGITS.search(body):
        for match in _LARGE.finditer(_STRING.sub(b'""', body)):
            if math.isinf(float(match[0])):
                return match[0].decode()
    return ""


def custom_id_of(given: str | int | float) -> str | None:
    """Return what a line gives as text: a whole number as its digits, for 7 is 7.0 in a column of
    pandas that has a gap. None for other numbers, and for floats that may stand for several."""
    if isinstance(given, float):
        return str(int(given)) if given.is_integer() and abs(given) < 2**53 else None
    return str(given)


def _shape_error(message: str, number: int) -> LineError:
    """Return the error of a line that is JSON but not of the right shape."""
    field, shape = _FIELD.search(message), _SHAPE.search(message)
    if field and "missing" in message:
        name = field[1]
        return _error("missing_required_parameter", number, f"{name} is missing", name)
    if field:
        name = cut(field[1], MAX_PARAM)
        known = ", ".join(_Line.__struct_fields__)
        return _error("unknown_parameter", number, f"{name} is none of {known}", name)
    if shape is None:
        return _error("invalid_type", number, message)
    got, key = shape.groups()
    wanted = {None: "an object", "custom_id": "a string or a whole number"}.get(key, "a string")
    return _error("invalid_type", number, f"{key or 'a line'} must be {wanted}; got {got}", key)


def _error(code: str, line: int, message: str, param: str | None = None) -> LineError:
    return LineError(
        code=code,
        message=cut(message, MAX_MESSAGE),
        line=line,
        param=param and cut(param, MAX_PARAM),
    )


def _size(body: bytes) -> int:
    try:
        size = _decode_size(body)
        prompts = count_items(size.prompt)
    except UNDECODABLE:
        return 1  # whoever answers it says what is wrong
    return max(1, prompts * max(size.n or 1, size.best_of or 1))


async def answer_line(
    line: BatchLine, answerers: Mapping[str, Answerer], owner: RequestOwner, job: str
) -> LineResult:
    """Answer a line under an id made of the job's id and the line's number.

    Raises SRMError if it has not been answered and is to be sent again: the engine is away or
    failed, its queue is full, or the `request_id` that the body gives is in use.
    """
    request_id = f"{job}-{line.number}"
    try:
        body = await answerers[line.url].answer_whole(line.body, request_id, owner)
    except (Overloaded, IdInUse):
        raise
    except RequestError as error:
        return refused(line, job, error)
    except TimedOut as error:
        return never_run(line.number, line.custom_id, job, error.code, error.message)
    record = _Record(
        record_id(job, line.number), line.custom_id, _Response(200, request_id, Raw(body))
    )
    return LineResult(line.number, _line(record), False, _decode_used(body).of_line)


def refused(line: BatchLine, job: str, error: SRMError | None) -> LineResult:
    """Return the result of a line whose request is at fault; with None, of one that met a bug of
    ours."""
    status, body = (500, INTERNAL) if error is None else (status_of(error), body_of(error))
    response = _Response(status, f"{job}-{line.number}", Raw(_encode(body)))
    record = _Record(record_id(job, line.number), line.custom_id, response)
    return LineResult(line.number, _line(record), True)


def never_run(number: int, custom_id: str | None, job: str, code: str, message: str) -> LineResult:
    """Return the result of a line that has no response; `code` is OpenAI's, such as
    batch_expired."""
    record = _Record(record_id(job, number), custom_id, None, _Error(code, message))
    return LineResult(number, _line(record), True)


def _line(record: _Record) -> bytes:
    """Encode a record as JSON that every reader takes for one line."""
    return escape_line_ends(_encode(record))


def record_id(job: str, number: int) -> str:
    """Return the id of a line's result."""
    return f"batch_req_{job.removeprefix('batch_')}_{number}"


class Kept(NamedTuple):
    """A record of an earlier run."""

    id: str
    number: int
    custom_id: str | None
    is_failed: bool
    usage: LineUsage
    code: str
    """Why the line has no response; empty if it has one."""


def decode_kept(record: bytes) -> Kept | None:
    """Decode a record of an earlier run; None if it is damaged. What is in it twice is equal."""
    try:
        record.decode()  # strings that are passed over are not looked at
        decoded = _decode_kept(record)
    except UNDECODABLE:
        return None
    numbers = _NUMBER.search(decoded.id)
    if numbers is None:
        return None
    number, response = int(numbers[1]), decoded.response
    if response is not None and not response.request_id.endswith(f"-{number}"):
        return None
    code = decoded.error.code if decoded.error else ""
    is_failed = response is None or response.status_code != 200
    usage = NO_USAGE if response is None else response.body.of_line
    return Kept(decoded.id, number, decoded.custom_id, is_failed, usage, code)
