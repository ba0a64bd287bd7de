"""/v1/batches: jobs of many requests, made, watched and cancelled.

Jobs are recorded here and run elsewhere. A key sees its own batches alone.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Annotated, get_args

import msgspec
from msgspec import Meta

from srm.engine.messages import MAX_PRIORITY, MAX_WEIGHT, MIN_WEIGHT
from srm.errors import InvalidRequest, NotFound
from srm.memory import read_text
from srm.server.errors import BatchesUnavailable, Conflict
from srm.server.generation.engine_request import of_current_request
from srm.server.http.bodies import parsed
from srm.server.http.responses import add_operations
from srm.server.routes.files import Anchor, Seconds, ThreadedStore
from srm.server.schema.openapi import BodySchema, Operation, Router
from srm.server.schema.sampling_fields import Metadata
from srm.server.schema.validation import Fields, checked, given_fields, refused, require
from srm.server.storage import batch_replies as replies
from srm.server.storage.records import WINDOW, BatchRecord, LineError, Url, new_batch_id
from srm.server.storage.store import Store
from srm.server.wiring import ServerWiring

MAX_LISTED = 100
MAX_WINDOW_DAYS = 30


class OutputExpiresAfter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    anchor: Anchor
    seconds: Seconds


class BatchRequest(Fields, frozen=True, kw_only=True):
    """Body of POST /v1/batches, checked."""

    input_file_id: Annotated[str, Meta(description="the id of one of your files")]
    """The file whose lines are the requests."""
    endpoint: Annotated[Url, Meta(description=" or ".join(get_args(Url)))]
    """The route of all lines."""
    completion_window: Annotated[
        str,
        Meta(
            pattern=WINDOW,
            description=f"hours or days, as 24h or 7d, at most {MAX_WINDOW_DAYS}d",
        ),
    ]
    """Time after which the batch expires."""
    metadata: Metadata | None = None
    """Returned with the batch."""
    output_expires_after: (
        Annotated[
            OutputExpiresAfter,
            Meta(description="an object with anchor: created_at and seconds: 3600 to 2592000"),
        ]
        | None
    ) = None
    """How long output and error files are kept; by default until deleted."""
    weight: Annotated[float, Meta(ge=MIN_WEIGHT, le=MAX_WEIGHT)] = 1.0
    """Share of the slots beside other batches."""
    priority: Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    """Of one key's batches, higher values go first."""

    @property
    def window_s(self) -> int:
        number, unit = int(self.completion_window[:-1]), self.completion_window[-1]
        return number * 3600 * (24 if unit == "d" else 1)

    def check(self) -> None:
        if self.window_s > MAX_WINDOW_DAYS * 24 * 3600:
            raise refused(type(self), "completion_window", self.completion_window)


class BatchQuery(Fields, frozen=True, kw_only=True):
    """The query of GET /v1/batches."""

    after: Annotated[str, Meta(description="the id of one of your batches")] | None = None
    """List the batches that follow this one."""
    limit: Annotated[int, Meta(ge=1, le=MAX_LISTED)] = 20
    """Most batches in the reply."""


_ID = {"batch_id": "The id of a batch."}
_EXAMPLES = {
    "Chats of a file": {
        "input_file_id": "file-0934f4a1ffc942fd2146800c5227e531",
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
    },
}
OPERATIONS = (
    Operation("POST", "/v1/batches", "Start a batch of the requests in a file.",
              replies.Batch, body=BodySchema(BatchRequest, examples=_EXAMPLES),
              errors=(404, 507)),
    Operation("GET", "/v1/batches", "The batches there are, newest first.",
              replies.BatchList, query=BatchQuery, errors=(400,)),
    Operation("GET", "/v1/batches/{batch_id}", "How far a batch is.",
              replies.Batch, parameters=_ID, errors=(404,)),
    Operation("POST", "/v1/batches/{batch_id}/cancel", "Stop a batch; what it has done is kept.",
              replies.Batch, parameters=_ID, errors=(404, 409, 507)),
)  # fmt: skip


class Batches(ThreadedStore):
    """The batches of the keys of this server."""

    def __init__(
        self,
        store: Store,
        threads: ThreadPoolExecutor,
        config: ServerWiring,
        has_chats: bool,
    ) -> None:
        """`has_chats`: whether the model has a chat template."""
        super().__init__(store, threads)
        self._config = config
        self._has_chats = has_chats

    async def create(self, body: bytes) -> replies.Batch:
        """Raises the RequestError to answer with, or StoreError."""
        asked = await parsed(parse_batch, body)
        if why := read_text(self._config.why_no_jobs_fd):
            raise BatchesUnavailable(f"batches are not run now: {why}")
        if asked.endpoint != "/v1/completions" and not self._has_chats:
            raise InvalidRequest(
                "endpoint must be /v1/completions: this model has no chat template", "endpoint"
            )
        created_at = int(time.time())
        expiry = asked.output_expires_after
        record = BatchRecord(
            id=new_batch_id(),
            owner=of_current_request().share,
            endpoint=asked.endpoint,
            input_file_id=asked.input_file_id,
            completion_window=asked.completion_window,
            created_at=created_at,
            expires_at=created_at + asked.window_s,
            metadata=asked.metadata,
            model=self._config.model_name,
            model_id=self._config.model_id or None,
            weight=asked.weight,
            priority=asked.priority,
            output_expires_after=expiry.seconds if expiry else None,
        )
        adding = self._run(self._store.add_batch, record, self._config.max_batches)
        await asyncio.shield(adding)  # whoever asked may leave
        return replies.batch(record)

    async def list(self, query: BatchQuery) -> replies.BatchList:
        """Raises InvalidRequest and StoreError."""
        asked = of_current_request().share, query.limit + 1, query.after
        records = await self._run(self._store.list_batches, *asked)
        if records is None:
            raise InvalidRequest(f"after = {query.after!r:.80} is none of your batches", "after")
        return replies.batch_list([self._explain(record) for record in records], query.limit)

    async def get(self, batch_id: str) -> replies.Batch:
        """Raises NotFound and StoreError."""
        record = await self._run(self._store.get_batch, batch_id, of_current_request().share)
        if record is None:
            raise NotFound(f"there is no batch {batch_id[:80]!r}", "batch_id")
        return replies.batch(self._explain(record))

    async def cancel(self, batch_id: str) -> replies.Batch:
        """Raises NotFound, StoreError, and Conflict for a batch that is past stopping."""
        await self.get(batch_id)
        cancelling = partial(
            self._store.change_batch, batch_id, ("validating", "in_progress"), status="cancelling"
        )
        record = await self._run(cancelling)
        if record is not None:
            return replies.batch(record)
        batch = await self.get(batch_id)
        if batch.status not in {"cancelling", "cancelled"}:
            raise Conflict(f"batch {batch_id} is {batch.status}: it cannot be cancelled any more")
        return batch

    def _explain(self, record: BatchRecord) -> BatchRecord:
        """Add an error that says why this server does not run it, if it is of another model."""
        name = self._config.model_name
        if not record.is_runnable or record.is_of(self._config.model_id, name):
            return record
        also = ", of other weights or another tokenizer" if record.model == name else ""
        message = (
            f"only a server of the model that took it, {record.model!r}, runs it, with this "
            f"data_dir; this one has {name!r}{also}"
        )
        error = LineError(code="other_model", message=message)
        return msgspec.structs.replace(record, errors=[*(record.errors or []), error])


def parse_batch(body: bytes) -> BatchRequest:
    """The body of POST /v1/batches. Raises InvalidRequest naming the field."""
    given = given_fields(body, BatchRequest, {})
    for field in msgspec.structs.fields(BatchRequest):
        if field.required:
            require(given, field.name)
    return checked(BatchRequest, given, {}, {})


def add_routes(router: Router, batches: Batches, max_body_bytes: int) -> None:
    """Add the routes of this module."""
    actions = (batches.create, batches.list, batches.get, batches.cancel)
    add_operations(router, OPERATIONS, actions, max_body_bytes)
