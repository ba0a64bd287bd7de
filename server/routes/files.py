"""/v1/files: what batches read and write, uploaded, listed, fetched and deleted.

A key sees its own files alone; every other is as if it were not there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Annotated, BinaryIO, Literal, TypeVar

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from srm.errors import InvalidRequest, NotFound
from srm.server.generation.engine_request import of_current_request
from srm.server.http.responses import WhileConnected, add_operations
from srm.server.schema.openapi import Operation, Router
from srm.server.schema.validation import Fields, from_text
from srm.server.storage import batch_replies as replies
from srm.server.storage.database import translated
from srm.server.storage.downloads import Download
from srm.server.storage.records import FileRecord
from srm.server.storage.store import Store
from srm.server.storage.upload_form import UploadForm
from srm.server.storage.uploads import Uploads

MAX_LISTED = 10_000
EXPIRY_S = 3600, 30 * 24 * 3600
"""Shortest and longest time that an upload may ask to be kept, in seconds."""
DEFAULT_EXPIRY_S = EXPIRY_S[1]
"""Seconds that uploads, which are input of batches, are kept by default."""

T = TypeVar("T")
Anchor = Literal["created_at"]
Seconds = Annotated[int, Meta(ge=EXPIRY_S[0], le=EXPIRY_S[1])]


class FileForm(Fields, frozen=True, kw_only=True):
    """The form of POST /v1/files."""

    file: Annotated[bytes, Meta(description="a file with its name")]
    """The file; its name is kept and returned."""
    purpose: Literal["batch"]
    """What the file is for."""
    anchor: Anchor | None = msgspec.field(default=None, name="expires_after[anchor]")
    """When the time of expires_after[seconds] begins."""
    seconds: Seconds | None = msgspec.field(default=None, name="expires_after[seconds]")
    """Seconds until the file is deleted; 30 days if neither field is given."""

    def check(self) -> None:
        if (self.anchor is None) != (self.seconds is None):
            missing = "anchor" if self.anchor is None else "seconds"
            raise InvalidRequest(
                "expires_after needs both expires_after[anchor] and expires_after[seconds]",
                f"expires_after[{missing}]",
            )


class FileQuery(Fields, frozen=True, kw_only=True):
    """The query of GET /v1/files."""

    after: Annotated[str, Meta(description="the id of one of your files")] | None = None
    """List the files that follow this one."""
    limit: Annotated[int, Meta(ge=1, le=MAX_LISTED)] = MAX_LISTED
    """Most files in the reply."""
    order: Literal["asc", "desc"] = "desc"
    """Oldest or newest first."""
    purpose: str | None = None
    """List only files with this purpose."""


_FILE = "file", ""
"""Stands for the file when the form's fields are checked."""
_ID = {"file_id": "The id of a file."}
OPERATIONS = (
    Operation("POST", "/v1/files", "Upload a file for a batch.",
              replies.FileObject, form=FileForm, errors=(403, 507)),
    Operation("GET", "/v1/files", "The files there are.",
              replies.FileList, query=FileQuery, errors=(400,)),
    Operation("GET", "/v1/files/{file_id}", "What is known of a file.",
              replies.FileObject, parameters=_ID, errors=(404,)),
    Operation("DELETE", "/v1/files/{file_id}", "Delete a file.",
              replies.FileDeleted, parameters=_ID, errors=(404, 409, 507)),
    Operation("GET", "/v1/files/{file_id}/content", "The bytes of a file; a Range is 206.",
              ("application/octet-stream",), parameters=_ID, errors=(404, 416)),
)  # fmt: skip


class ThreadedStore:
    """Reads and changes the store, in threads."""

    def __init__(self, store: Store, threads: ThreadPoolExecutor) -> None:
        self._store = store
        self._threads = threads

    async def _run(self, function: Callable[..., T], *args: object) -> T:
        """Return what a function of the store returns. Raises what it raises."""
        return await asyncio.get_running_loop().run_in_executor(
            self._threads, partial(function, *args)
        )


class Files(ThreadedStore):
    """The files of the keys of this server."""

    def __init__(
        self, store: Store, threads: ThreadPoolExecutor, max_file_bytes: int, max_store_bytes: int
    ) -> None:
        super().__init__(store, threads)
        self._uploads = Uploads(store, threads, max_file_bytes, max_store_bytes)

    async def upload(self, request: Request) -> replies.FileObject:
        """Raises the RequestError to answer with, or StoreError."""
        names = frozenset(field.encode_name for field in msgspec.structs.fields(FileForm))
        form = UploadForm(request.headers.get("content-type", ""), names)
        owner = of_current_request().share
        upload = self._uploads.begin(owner)
        try:
            await upload.open()
            async for data in request.stream():
                pieces = form.parse(data)
                if pieces and "purpose" in form.fields:  # before all of the file is here
                    from_text(FileForm, [_FILE, ("purpose", form.fields["purpose"])])
                for piece in pieces:
                    await upload.write(piece)
            asked = from_text(FileForm, [_FILE, *form.fields.items()])
            created_at = int(time.time())
            record = FileRecord(
                id=upload.id,
                owner=owner,
                filename=form.finish(),
                purpose=asked.purpose,
                num_bytes=upload.num_bytes,
                created_at=created_at,
                expires_at=created_at + (asked.seconds or DEFAULT_EXPIRY_S),
            )
            await upload.keep(record)
        finally:
            upload.end()
        return replies.file_object(record)

    async def list(self, query: FileQuery) -> replies.FileList:
        """Raises InvalidRequest and StoreError."""
        asked = of_current_request().share, query.limit + 1, query.after
        is_oldest_first = query.order == "asc"
        records = await self._run(self._store.list_files, *asked, is_oldest_first, query.purpose)
        if records is None:
            raise InvalidRequest(f"after = {query.after!r:.80} is none of your files", "after")
        return replies.file_list(records, query.limit)

    async def get(self, file_id: str) -> replies.FileObject:
        """Raises NotFound and StoreError."""
        return replies.file_object(await self._find(file_id))

    async def _find(self, id: str) -> FileRecord:
        record = await self._run(self._store.get_file, id, of_current_request().share)
        if record is None:
            raise _not_found(id)
        return record

    async def delete(self, file_id: str) -> replies.FileDeleted:
        """Raises NotFound, Conflict and StoreError."""
        if not await self._run(self._store.delete_file, file_id, of_current_request().share):
            raise _not_found(file_id)
        return replies.FileDeleted(id=file_id)

    async def content(self, file_id: str) -> Response:
        """Raises NotFound and StoreError."""
        return WhileConnected(lambda: self._download(file_id))

    async def _download(self, id: str) -> Download:
        record = await self._find(id)
        file = await self._run(self._open, id)
        return Download(file, record.num_bytes, id, record.filename, self._threads)

    def _open(self, id: str) -> BinaryIO:
        path = self._store.path_of(id)
        with translated(self._store.folder):
            try:
                return path.open("rb", buffering=0)
            except FileNotFoundError:  # deleted since
                raise _not_found(id) from None


def _not_found(id: str) -> NotFound:
    return NotFound(f"there is no file {id[:80]!r}", "file_id")


def add_routes(router: Router, files: Files) -> None:
    """Add the routes of this module."""
    actions = (files.upload, files.list, files.get, files.delete, files.content)
    add_operations(router, OPERATIONS, actions)
