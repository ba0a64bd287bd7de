"""Wire shapes of files and batches: what clients are told of records."""

from __future__ import annotations

from typing import Literal

import msgspec

from srm.server.schema.states import Listing
from srm.server.storage.records import (
    RUNNABLE,
    BatchRecord,
    BatchStatus,
    FileRecord,
    FileStatus,
    Purpose,
)


class FileObject(msgspec.Struct, kw_only=True):
    """Times are Unix seconds."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: Purpose
    status: FileStatus
    status_details: str | None = None


class FileList(Listing, kw_only=True):
    data: list[FileObject]


class FileDeleted(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


class BatchError(msgspec.Struct, kw_only=True):
    code: str
    line: int | None
    message: str
    param: str | None


class BatchErrors(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[BatchError]


class RequestCounts(msgspec.Struct, kw_only=True):
    total: int
    completed: int
    failed: int


class InputTokensDetails(msgspec.Struct):
    cached_tokens: int


class OutputTokensDetails(msgspec.Struct):
    reasoning_tokens: int = 0


class BatchUsage(msgspec.Struct, kw_only=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class Batch(msgspec.Struct, kw_only=True):
    """Times are Unix seconds."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    model: str | None
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: BatchStatus
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    usage: BatchUsage
    metadata: dict[str, str] | None
    weight: float
    priority: int


class BatchList(Listing, kw_only=True):
    data: list[Batch]


def file_object(record: FileRecord) -> FileObject:
    """Return the file as clients see it."""
    names = ("id", "created_at", "expires_at", "filename", "purpose", "status")
    return FileObject(bytes=record.num_bytes, **{name: getattr(record, name) for name in names})


def file_list(records: list[FileRecord], limit: int) -> FileList:
    """Return a list of up to `limit` records; a further record sets `has_more`."""
    return FileList.begin([file_object(record) for record in records], limit)


def batch(record: BatchRecord) -> Batch:
    """Return the batch as clients see it: with its output files once it has ended."""
    is_final = record.status not in RUNNABLE
    return Batch(
        **{name: getattr(record, name) for name in _SAME},
        errors=BatchErrors(
            data=msgspec.convert(record.errors, list[BatchError], from_attributes=True)
        )
        if record.errors
        else None,
        output_file_id=record.output_file_id if is_final else None,
        error_file_id=record.error_file_id if is_final else None,
        request_counts=RequestCounts(
            total=record.total, completed=record.completed, failed=record.failed
        ),
        usage=BatchUsage(
            input_tokens=record.input_tokens,
            input_tokens_details=InputTokensDetails(record.cached_tokens),
            output_tokens=record.output_tokens,
            output_tokens_details=OutputTokensDetails(),
            total_tokens=record.input_tokens + record.output_tokens,
        ),
    )


def batch_list(records: list[BatchRecord], limit: int) -> BatchList:
    """Return a list of up to `limit` records; a further record sets `has_more`."""
    return BatchList.begin([batch(record) for record in records], limit)


_MADE = {"object", "errors", "output_file_id", "error_file_id", "request_counts", "usage"}
_SAME = [name for name in Batch.__struct_fields__ if name not in _MADE]
