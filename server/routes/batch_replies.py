"""Wire shapes of files and batches: what clients are told of records. Knows no store."""

from __future__ import annotations

from typing import Literal

import msgspec

from server.storage.records import (
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


class FileList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


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


class BatchList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool


def file_object(record: FileRecord) -> FileObject:
    return FileObject(
        id=record.id,
        bytes=record.num_bytes,
        created_at=record.created_at,
        expires_at=record.expires_at,
        filename=record.filename,
        purpose=record.purpose,
        status=record.status,
    )


def file_list(records: list[FileRecord], limit: int) -> FileList:
    """Return a list of up to `limit` records; a further record sets `has_more`."""
    data = [file_object(record) for record in records[:limit]]
    return FileList(
        data=data,
        first_id=data[0].id if data else None,
        last_id=data[-1].id if data else None,
        has_more=len(records) > limit,
    )


def batch(record: BatchRecord) -> Batch:
    """Return the batch as clients see it: with its output files once it has ended."""
    is_final = record.status not in RUNNABLE
    return Batch(
        id=record.id,
        endpoint=record.endpoint,
        model=record.model,
        errors=_errors(record),
        input_file_id=record.input_file_id,
        completion_window=record.completion_window,
        status=record.status,
        output_file_id=record.output_file_id if is_final else None,
        error_file_id=record.error_file_id if is_final else None,
        created_at=record.created_at,
        in_progress_at=record.in_progress_at,
        expires_at=record.expires_at,
        finalizing_at=record.finalizing_at,
        completed_at=record.completed_at,
        failed_at=record.failed_at,
        expired_at=record.expired_at,
        cancelling_at=record.cancelling_at,
        cancelled_at=record.cancelled_at,
        request_counts=RequestCounts(
            total=record.total, completed=record.completed, failed=record.failed
        ),
        usage=_usage(record),
        metadata=record.metadata,
        weight=record.weight,
        priority=record.priority,
    )


def batch_list(records: list[BatchRecord], limit: int) -> BatchList:
    """Return a list of up to `limit` records; a further record sets `has_more`."""
    data = [batch(record) for record in records[:limit]]
    return BatchList(
        data=data,
        first_id=data[0].id if data else None,
        last_id=data[-1].id if data else None,
        has_more=len(records) > limit,
    )


def _errors(record: BatchRecord) -> BatchErrors | None:
    if not record.errors:
        return None
    return BatchErrors(
        data=[
            BatchError(code=one.code, line=one.line, message=one.message, param=one.param)
            for one in record.errors
        ]
    )


def _usage(record: BatchRecord) -> BatchUsage:
    return BatchUsage(
        input_tokens=record.input_tokens,
        input_tokens_details=InputTokensDetails(record.cached_tokens),
        output_tokens=record.output_tokens,
        output_tokens_details=OutputTokensDetails(),
        total_tokens=record.input_tokens + record.output_tokens,
    )
