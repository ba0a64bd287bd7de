"""Records of files and batches, their states and their ids.

Ids are made here and are purely random, so whatever a client calls a thing never gets into a path.
Knows no database and no HTTP.
"""

from __future__ import annotations

import re
import secrets
from typing import Literal

import msgspec

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


_FILE_ID = re.compile(r"file-[0-9a-f]{32}")
_BATCH_ID = re.compile(r"batch_[0-9a-f]{32}")


class FileRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A file. Times are Unix seconds."""

    id: str
    owner: str = ""
    """Name of the API key that it belongs to; empty without keys."""
    filename: str
    """The client's name for it."""
    purpose: Purpose
    num_bytes: int
    created_at: int
    expires_at: int | None = None
    status: FileStatus = "processed"


class LineError(msgspec.Struct, frozen=True, kw_only=True):
    """Why a batch failed: something wrong with its input file, in a line of it if one is named."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A batch. Times are Unix seconds."""

    id: str
    owner: str = ""
    endpoint: str
    input_file_id: str
    completion_window: str
    status: BatchStatus = "validating"
    created_at: int
    expires_at: int
    """Time at which lines that are not done are given up."""
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    output_file_id: str | None = None
    """Set before the first line is answered. Clients see it when the file is there."""
    error_file_id: str | None = None
    total: int = 0
    """Lines of the input file, as far as they are counted."""
    completed: int = 0
    failed: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    metadata: dict[str, str] | None = None
    errors: list[LineError] | None = None
    model: str | None = None
    """The model name of the server that took it; in older records, set once it runs."""
    model_id: str | None = None
    """Identifies that model; None in older records."""
    weight: float = 1.0
    """Its share of the slots, relative to other batches."""
    priority: int = 0
    """Priority among batches; higher goes first."""
    output_expires_after: int | None = None
    """Seconds from when the output files are there until they expire."""

    @property
    def is_runnable(self) -> bool:
        return self.status in RUNNABLE

    def is_of(self, model_id: str, name: str) -> bool:
        """Whether a server of this model may run it."""
        if self.model_id is None:
            return self.model in (None, name)
        return self.model_id == model_id


def new_file_id() -> str:
    return f"file-{secrets.token_hex(16)}"


def new_batch_id() -> str:
    return f"batch_{secrets.token_hex(16)}"


def is_file_id(text: str) -> bool:
    return _FILE_ID.fullmatch(text) is not None


def is_batch_id(text: str) -> bool:
    return _BATCH_ID.fullmatch(text) is not None
