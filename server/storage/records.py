"""Records of files and batches, their states and their ids.

Ids are made here and are purely random, so whatever a client calls a thing never gets into a path.
A record is checked when it is read: ids, times and counts are what they can be, or it is damaged.
"""

from __future__ import annotations

import re
import secrets
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from srm.files import sealed, unsealed
from srm.server.schema.sampling_fields import Metadata

Url = Literal["/v1/completions", "/v1/chat/completions", "/v1/responses"]
"""The routes that the lines of a batch may ask."""
Purpose = Literal["batch", "batch_output"]
FileStatus = Literal["uploaded", "processed", "error"]
BatchStatus = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]
RUNNABLE: frozenset[str] = frozenset({"validating", "in_progress", "finalizing", "cancelling"})
"""States that a batch leaves by itself; it never leaves the others."""

WINDOW = r"^[1-9][0-9]{0,2}[hd]\Z"
"""What a completion window looks like: hours or days."""
_FILE_ID = r"^file-[0-9a-f]{32}\Z"
_BATCH_ID = r"^batch_[0-9a-f]{32}\Z"
FileId = Annotated[str, Meta(pattern=_FILE_ID)]
BatchId = Annotated[str, Meta(pattern=_BATCH_ID)]
Time = Annotated[int, Meta(ge=0, le=2**40)]
"""Unix seconds."""
Count = Annotated[int, Meta(ge=0, le=2**62)]
Priority = Annotated[int, Meta(gt=-1_000_000, lt=1_000_000)]
"""As far as batches stay behind people, whatever a request may ask for."""


class FileRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A file. Times are Unix seconds."""

    id: FileId
    owner: str = ""
    """Name of the API key that it belongs to; empty without keys."""
    filename: str
    """The client's name for it."""
    purpose: Purpose
    num_bytes: Count
    created_at: Time
    expires_at: Time | None = None
    status: FileStatus = "processed"


class LineError(msgspec.Struct, frozen=True, kw_only=True):
    """Why a batch failed: something wrong with its input file, in a line of it if one is named."""

    code: str
    message: str
    line: Count | None = None
    param: str | None = None


class BatchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A batch. Times are Unix seconds."""

    id: BatchId
    owner: str = ""
    endpoint: Url
    input_file_id: FileId
    completion_window: Annotated[str, Meta(pattern=WINDOW)]
    status: BatchStatus = "validating"
    created_at: Time
    expires_at: Time
    """Time at which lines that are not done are given up."""
    in_progress_at: Time | None = None
    finalizing_at: Time | None = None
    completed_at: Time | None = None
    failed_at: Time | None = None
    expired_at: Time | None = None
    cancelling_at: Time | None = None
    cancelled_at: Time | None = None
    output_file_id: FileId | None = None
    """Set before the first line is answered. Clients see it when the file is there."""
    error_file_id: FileId | None = None
    total: Count = 0
    """Lines of the input file, as far as they are counted."""
    completed: Count = 0
    failed: Count = 0
    input_tokens: Count = 0
    output_tokens: Count = 0
    cached_tokens: Count = 0
    metadata: Metadata | None = None
    errors: list[LineError] | None = None
    model: str | None = None
    """The model name of the server that took it; in older records, set once it runs."""
    model_id: str | None = None
    """Identifies that model; None in older records."""
    weight: float = 1.0
    """Its share of the slots, relative to other batches."""
    priority: Priority = 0
    """Priority among batches; higher goes first."""
    output_expires_after: Time | None = None
    """Seconds from when the output files are there until they expire."""

    @property
    def is_runnable(self) -> bool:
        return self.status in RUNNABLE

    def is_of(self, model_id: str, name: str) -> bool:
        """Whether a server of this model may run it."""
        if self.model_id is None:
            return self.model in (None, name)
        return self.model_id == model_id


Record = TypeVar("Record", bound=FileRecord | BatchRecord)
KINDS: tuple[type[FileRecord | BatchRecord], ...] = (BatchRecord, FileRecord)


def new_file_id() -> str:
    return f"file-{secrets.token_hex(16)}"


def new_batch_id() -> str:
    return f"batch_{secrets.token_hex(16)}"


def is_file_id(text: str) -> bool:
    return re.match(_FILE_ID, text) is not None


def is_batch_id(text: str) -> bool:
    return re.match(_BATCH_ID, text) is not None


def encode(record: FileRecord | BatchRecord) -> bytes:
    """Return a record as it is stored: JSON, with a checksum."""
    return sealed(msgspec.json.encode(record))


def decode(data: object, kind: type[Record]) -> Record:
    """Return the record of stored bytes. Raises one of UNDECODABLE if they are damaged."""
    if not isinstance(data, bytes):
        raise ValueError("it is no bytes")
    return msgspec.json.decode(unsealed(data), type=kind)
