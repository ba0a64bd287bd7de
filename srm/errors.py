"""Errors of the engine and of commands, as one tree; those of the server are in `server/errors.py`.

SRMError                 .code: stable string   .message: for the caller
├─ ConfigError           stops the program, exit 2
│  └─ DeviceRefused      exit 4: a GPU is not fit to be used
├─ CheckpointError       stops the program, exit 3: missing or extra tensor, wrong shape, bad config
├─ RequestError          the caller's fault; ends one request
│  ├─ InvalidRequest     .param names the field
│  ├─ IdInUse            by a request that still runs
│  ├─ SwapInProgress     the weights are being changed already
│  ├─ ContextTooLong
│  ├─ NotFound
│  └─ Overloaded         .retry_after_s
├─ EngineError           ours
│  ├─ EngineUnavailable  starting, draining or gone
│  ├─ SnapshotError      a snapshot cannot be written, or not be used; all goes on without it
│  ├─ TimedOut           it ran for longer than `request_timeout_s`
│  └─ StepFailed         the engine exits; the supervisor restarts it
└─ StoreError            files cannot be read or written now
   └─ StoreFull          no space is left on the disk
"""

from __future__ import annotations

import re
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Collection
from difflib import get_close_matches

import msgspec

UNDECODABLE = (ValueError, RecursionError)
"""Errors that decoders raise for malformed bytes.

msgspec's own errors and UnicodeDecodeError are ValueErrors; too deep nesting is a RecursionError.
"""


MAX_MESSAGE = 2_000
"""Most characters of the message of an error that a caller makes. What it repeats is cut where it
is made; this is for what was forgotten there."""
MAX_PARAM = 128


def cut(text: str, most: int) -> str:
    """A text, or as much of its beginning as `most` allows and a mark of what is missing."""
    return text if len(text) <= most else text[: most - 1] + "…"


def show_value(value: object) -> str:
    """Return the beginning of what Python writes for any value of a caller."""
    try:
        return f"{value!r:.80}"
    except (ValueError, RecursionError):  # an integer of thousands of digits, a list in itself
        return f"{type(value).__name__} too large to be written"


_FIELD = re.compile(r"Object (missing required|contains unknown) field `(.*)`", re.DOTALL)
_TYPES = re.compile(r"`([a-z]+(?: \| [a-z]+)*)`")
_IN_WORDS = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "a boolean",
    "array": "a list",
    "object": "an object",
}


def in_words(error: Exception, whole: str = "") -> str:
    """Return what msgspec says of a value in the words of our other messages; `whole` names what
    was decoded."""
    text, _, place = str(error).partition(" - at ")
    where = place.replace("`key`", "a key").replace("`", "")
    where = (where if whole else where.replace("$.", "")).replace("$", whole) or whole
    if field := _FIELD.fullmatch(text):
        is_what = "is missing" if field[1] == "missing required" else "is not a field"
        return f"{where}.{field[2]} {is_what}".lstrip(".")
    if not text.startswith("Expected"):
        return f"{where}: {text}" if where else text
    text = text.replace("Expected", "must be", 1).replace(", got ", "; got ", 1)
    text = _TYPES.sub(
        lambda types: " or ".join(_IN_WORDS.get(name, name) for name in types[1].split(" | ")), text
    )
    return f"{where} {text}".lstrip()


def did_you_mean(name: str, known: Collection[str], cutoff: float = 0.8) -> str:
    """Return the end of a message about a name that is none of those known: the one that it is
    likely a misspelling of, if any: first one of the same letters. Less alike is another name, such
    as `prompt_token_ids`."""
    close = get_close_matches(name, known, 5, cutoff) if len(name) <= 64 else []
    close.sort(key=lambda other: sorted(other) != sorted(name))
    return f"; did you mean {close[0]!r}?" if close else ""


_MARKS = {BOM_UTF16_LE, BOM_UTF16_BE}


def not_utf8(data: bytes, start: int = 0) -> str:
    """Return why bytes, which begin at `start`, are not text in UTF-8; empty if they are."""
    head = data[:10]
    if b"\0" in head and (head[:2] in _MARKS or any(head[::2]) != any(head[1::2])):
        return "it has bytes of 0, as UTF-16 has; it must be UTF-8"
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return f"byte {data[error.start]:#x} in position {start + error.start} is not UTF-8"
    return ""


def not_json_line(line: bytes) -> str:
    """Return why a line is not one JSON object in UTF-8; empty if it is. A decoder that misses a
    field says that first, also of what is no JSON."""
    line = line.strip()
    fault = not_utf8(line) or _syntax_fault(line)
    if line[:1] == b"[" or (fault and (line[-1:] == b"]" or line == b"],")):
        return "an array's bracket; it must be one JSON object a line, no brackets"
    if not fault:
        return ""
    if line[:1] == b"{" and line[-1:] == b"," and not _syntax_fault(line[:-1]):
        return "a comma follows the object; it must be one JSON object a line, no commas"
    if line[:1] == b"{" and "truncated" in fault:
        return "the object does not end here; it must be one JSON object a line"
    return fault


def _syntax_fault(data: bytes) -> str:
    try:
        msgspec.json.decode(data, type=msgspec.Raw)
    except UNDECODABLE as error:
        return str(error)
    return ""


class SRMError(Exception):
    """Base of all errors; `code` is stable and machine-readable, `message` is for a person."""

    code = "error"
    exit_code = 1

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class ConfigError(SRMError):
    code = "config_error"
    exit_code = 2


class DeviceRefused(ConfigError):
    """A GPU is not fit to be used; another one of the same machine may be."""

    code = "device_refused"
    exit_code = 4


class CheckpointError(SRMError):
    code = "checkpoint_error"
    exit_code = 3


class RequestError(SRMError):
    """The caller's fault. `param` names the offending field, where there is one."""

    code = "invalid_request"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(cut(message, MAX_MESSAGE))
        self.param = param and cut(param, MAX_PARAM)


class InvalidRequest(RequestError):
    code = "invalid_request"


class IdInUse(RequestError):
    code = "id_in_use"


class SwapInProgress(RequestError):
    code = "swap_in_progress"


class ContextTooLong(RequestError):
    """A prompt has more tokens than the context. Clients know it by the words: LiteLLM by those of
    the beginning, LangChain by those of the end."""

    code = "context_length_exceeded"

    @classmethod
    def from_length(cls, num_tokens: int | str, n_ctx: int, param: str) -> ContextTooLong:
        return cls(
            f"This model's maximum context length is {n_ctx} tokens. However, your prompt has "
            f"{num_tokens} tokens: the prompt is too long.",
            param,
        )


class NotFound(RequestError):
    code = "not_found"


class Overloaded(RequestError):
    """The queue is full. `retry_after_s` is when trying again is reasonable, in seconds.

    `excess` is how many waiting sequences must have started by then, where that is known.
    """

    code = "overloaded"

    def __init__(self, message: str, retry_after_s: int = 1, excess: int = 0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.excess = excess


class EngineError(SRMError):
    code = "engine_error"


class EngineUnavailable(EngineError):
    code = "engine_unavailable"


class SnapshotError(EngineError):
    code = "snapshot_failed"


class TimedOut(EngineError):
    code = "request_timeout"


class StepFailed(EngineError):
    code = "step_failed"


class StoreError(SRMError):
    """The storage of files and batches does not work; the message says what to do."""

    code = "store_unavailable"


class StoreFull(StoreError):
    code = "store_full"
