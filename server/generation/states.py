"""States of prompts as objects: made by the engine, kept in the store, given to requests.

A state stands after all its tokens but the last, so what goes on from it feeds that one first. It
is a function of weights, arithmetic and tokens: what goes on from it has the tokens and
log-probabilities of the whole prompt, bit for bit, and only costs less.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
import numpy as np
from msgspec import UNSET, Raw, UnsetType

from srm.engine.client.client import EngineClient
from srm.engine.config import ModelConfig
from srm.engine.messages import PROMPT, EndRequests, Output, Request, SamplingParams, Status
from srm.engine.state_file import MOST_HEADER, StateContent, from_file
from srm.errors import (
    ContextTooLong,
    EngineUnavailable,
    InvalidRequest,
    NotFound,
    Overloaded,
    RequestError,
)
from srm.server.errors import Conflict, NotFinite, PreviousNotFound
from srm.server.generation.engine_request import RequestOwner, state_fields
from srm.server.generation.prompts import GivenState
from srm.server.schema.states import DEFAULT_TTL_S
from srm.server.storage.states import StateRecord, StateStore, new_state_id
from srm.tasks import task_group

_AT_ONCE = 8
"""Most states of one request that are being made."""

_NOTHING = StateContent(b"", b"")

T = TypeVar("T")


class States:
    """Makes, reads and deletes the states of the keys of a server."""

    def __init__(
        self,
        store: StateStore,
        client: EngineClient,
        model: ModelConfig,
        threads: ThreadPoolExecutor,
        max_bytes: int = 0,
    ) -> None:
        """`max_bytes`: most bytes of one key's states; 0: no limit."""
        self._store, self._client, self._model = store, client, model
        self._threads, self._max_bytes = threads, max_bytes
        self.release = store.release

    async def make(
        self,
        token_ids: bytes,
        owner: RequestOwner,
        given: GivenState | None = None,
        metadata: dict[str, str] | None = None,
        ttl_s: int = DEFAULT_TTL_S,
    ) -> StateRecord:
        """Have the engine make the state of these tokens, from a `given` one of the first of them,
        and keep it. Raises what the engine refuses, QuotaExceeded and StoreError."""
        made = await self._read(token_ids, owner, given)
        record = self._record(new_state_id(), owner, *made, metadata or {}, ttl_s)
        return await self._add(record, made[0])

    async def keep(
        self,
        id: str,
        token_ids: bytes,
        owner: RequestOwner,
        given: GivenState | None,
        turn: Raw,
        is_pending: bool = False,
    ) -> None:
        """Keep a response of this id, with the state of its tokens; without one if they are more
        than the context. One that `is_pending` takes its place; once that has ended, no state is
        made, and it is dropped. `stop` ends it. Raises as `make`."""
        made = StateContent(token_ids, b""), "", ""

        async def read() -> tuple[StateContent, str, str]:
            if is_pending:
                there = await self._run(self._store.get, id, owner.key)
                if there is None or not there[0].is_pending:
                    return made
            return await self._read(token_ids, owner, given, name=id if is_pending else "")

        if len(token_ids) // 4 <= self._model.n_ctx:
            made = await _when_there_is_room(read)
        record = self._record(id, owner, *made, turn=turn)
        if is_pending:
            await self._run(self._store.add, record, made[0], self._max_bytes, True)
        else:
            await self._add(record, made[0])

    async def begin(self, id: str, owner: RequestOwner, turn: Raw) -> None:
        """Keep that a response is being made here, until `release`. Raises QuotaExceeded and
        StoreError."""
        record = self._record(id, owner, _NOTHING, "", "", turn=turn)
        await self._add(msgspec.structs.replace(record, is_pending=True), _NOTHING)

    async def end(self, id: str, owner: RequestOwner, turn: Raw) -> None:
        """Have a response without tokens take the place of a pending one, unless that has ended.
        Raises StoreError."""
        record = self._record(id, owner, _NOTHING, "", "", turn=turn)
        await self._run(self._store.add, record, _NOTHING, 0, True)

    async def stop(self, id: str, owner: RequestOwner) -> None:
        """Have the engines end the request that this is the name of, whichever process asked."""
        message = EndRequests(uuid.uuid4().hex, frozenset({id}), owner.share)
        with suppress(EngineUnavailable):  # what one ran that is away has ended
            await self._client.control(message)

    async def _read(
        self, token_ids: bytes, owner: RequestOwner, given: GivenState | None, name: str = ""
    ) -> tuple[StateContent, str, str]:
        """Return the state of these tokens, from a `given` one if they begin with its, and
        fingerprint and arithmetic of what made it. `name` is for `EndRequests`."""
        if given is not None and not token_ids.startswith(given.token_ids):
            given = None
        request = Request(
            id=f"state-{uuid.uuid4().hex}",
            prompt_token_ids=token_ids,
            params=SamplingParams(max_tokens=0),
            priority=owner.priority,
            share=owner.share,
            weight=owner.weight,
            returns_state=True,
            name=name,
            **state_fields(given, owner.salt()),
        )
        outputs: list[Output] = []
        with self._client.open([request]) as stream:
            while stream.unfinished:
                await stream.wait()
                outputs += [output for _, output in stream.take_outputs()]
            version = stream.first_version
        if [output.index for output in outputs] != [PROMPT, 0]:  # it was ended before
            raise EngineUnavailable("the state was not made: what ran was ended meanwhile")
        content = StateContent(token_ids, outputs[0].state)
        if not np.isfinite(np.frombuffer(content.state, "<f4")).all():
            raise NotFinite("the model's state after the prompt is not finite")
        arithmetic = self._status().arithmetic
        fingerprint = self._client.fingerprints.get(version, self._status().fingerprint)
        return content, fingerprint, arithmetic

    async def make_all(
        self, token_ids: list[bytes], owner: RequestOwner, given: GivenState | None = None
    ) -> list[str]:
        """Make a state of each, all or none; return their ids. Raises as `make`."""
        made: list[str] = []
        turns = asyncio.Semaphore(_AT_ONCE)

        async def make(own: bytes) -> str:
            async with turns:
                record = await _when_there_is_room(lambda: self.make(own, owner, given))
            made.append(record.id)
            return record.id

        try:
            async with task_group() as group:
                tasks = [group.create_task(make(own)) for own in token_ids]
        except BaseException:
            for id in made:
                await asyncio.shield(self._run(self._store.delete, id, owner.key))
            raise
        return [task.result() for task in tasks]

    async def given(
        self, id: str, owner: RequestOwner, refeed: bool = False, field: str = "state"
    ) -> GivenState:
        """Return what a request goes on from by this field. With `refeed` the tokens of a state of
        other weights are fed. Raises as `get`, and Conflict for other weights or arithmetic."""
        record, content = await self.get(id, owner, field)
        status = self._status()
        made_by = record.fingerprint, record.arithmetic
        own = status.fingerprint, status.arithmetic
        if made_by != own and not refeed:
            raise Conflict(
                f"state {id} was made by weights {made_by[0]} in {made_by[1]}, and this server has "
                f'{own[0]} in {own[1]}: "refeed": true feeds its tokens to these',
                "state",
            )
        state = content.state if made_by == own else b""
        return GivenState(content.token_ids, state, record.fingerprint, record.turn)

    async def get(
        self, id: str, owner: RequestOwner, field: str = "state"
    ) -> tuple[StateRecord, StateContent]:
        """Return a state of a key, or a response if another field names it. Raises NotFound,
        PreviousNotFound and StoreError."""
        if _is_of(field, id) and (there := await self._run(self._store.get, id, owner.key)):
            return there
        raise _not_found(id, field)

    async def list(self, owner: RequestOwner, limit: int, after: str | None) -> list[StateRecord]:
        """Return at most `limit` states of a key, newest first. Raises InvalidRequest."""
        records = await self._run(self._store.list, owner.key, limit, after)
        if records is None:
            raise InvalidRequest(f"after = {after!r:.80} is none of your states", "after")
        return records

    async def delete(self, id: str, owner: RequestOwner, field: str = "state") -> None:
        """Delete what `get` returns. Raises NotFound and StoreError."""
        if not (_is_of(field, id) and await self._run(self._store.delete, id, owner.key)):
            raise _not_found(id, field)

    async def put(self, id: str, file: bytes, owner: RequestOwner) -> StateRecord:
        """Keep the state of a file, which may be another server's of the same weights. Raises
        InvalidRequest for what is none, Conflict for other weights, QuotaExceeded, StoreError."""
        content, fingerprint, arithmetic = from_file(file)
        for name, its in (("fingerprint", fingerprint), ("arithmetic", arithmetic)):
            if its != (own := getattr(self._status(), name)):
                raise Conflict(f"the state's {name} is {its!r}, and this server's {own!r}", name)
        record = self._record(id, owner, content, fingerprint, arithmetic)
        self._check(content)
        return await self._run(self._store.add, record, content, self._max_bytes)

    @property
    def most_file_bytes(self) -> int:
        """Largest file of a state."""
        return 4 * (self._model.state_width + self._model.n_ctx) + MOST_HEADER

    def _check(self, content: StateContent) -> None:
        tokens = np.frombuffer(content.token_ids, "<i4")
        if len(tokens) > self._model.n_ctx:
            raise ContextTooLong.from_length(len(tokens), self._model.n_ctx, "token_ids")
        if not len(tokens) or not 0 <= tokens.min() <= tokens.max() < self._model.vocab_size:
            got = f"{tokens.min()} … {tokens.max()}" if len(tokens) else "none"
            allowed = f"0 … {self._model.vocab_size - 1}"
            raise InvalidRequest(
                f"token_ids must be {allowed}, at least one; got {got}", "token_ids"
            )
        state = np.frombuffer(content.state, "<f4")
        width = self._model.state_width if len(tokens) > 1 else 0
        if len(state) != width:
            raise InvalidRequest(f"state must have {width} values, got {len(state)}", "state")
        if not np.isfinite(state).all():
            raise InvalidRequest("state must be finite, got NaN or an infinity", "state")

    def _record(
        self,
        id: str,
        owner: RequestOwner,
        content: StateContent,
        fingerprint: str,
        arithmetic: str,
        metadata: dict[str, str] = {},  # noqa: B006  # it is not changed
        ttl_s: int = DEFAULT_TTL_S,
        turn: Raw | UnsetType = UNSET,
    ) -> StateRecord:
        now = int(time.time())
        return StateRecord(
            id=id,
            owner=owner.key,
            num_tokens=len(content.token_ids) // 4,
            num_bytes=content.num_bytes + len(msgspec.json.encode(metadata)) + len(turn or b""),
            fingerprint=fingerprint,
            arithmetic=arithmetic,
            created_at=now,
            expires_at=now + ttl_s,
            metadata=metadata,
            digest=content.digest(fingerprint, arithmetic),
            turn=turn,
        )

    async def _add(self, record: StateRecord, content: StateContent) -> StateRecord:
        """Keep what was made, unless whoever asked for it has gone meanwhile."""
        adding = asyncio.ensure_future(self._run(self._store.add, record, content, self._max_bytes))
        try:
            return await asyncio.shield(adding)
        except asyncio.CancelledError:
            await asyncio.wait([adding])  # a thread does not stop
            if not adding.exception():
                await self._run(self._store.delete, record.id, record.owner)
                self._store.release(record.id)
            raise

    def _status(self) -> Status:
        return self._client.require_status()

    async def _run(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *args)


async def _when_there_is_room(make: Callable[[], Awaitable[T]]) -> T:
    """Return what is made, though the engine is full at first: what was sampled would be lost."""
    while True:
        try:
            return await make()
        except Overloaded as error:
            await asyncio.sleep(error.retry_after_s or 1)


def _is_of(field: str, id: str) -> bool:
    """Whether the id is of the kind that this field names."""
    return id.startswith("state_" if field.startswith("state") else "resp_")


def _not_found(id: str, field: str) -> RequestError:
    kind = "state" if field.startswith("state") else "response"
    message = f"there is no {kind} {id[:80]!r}"
    if field == "previous_response_id":
        return PreviousNotFound(f"{message}: only those made with store = true are kept", field)
    return NotFound(message, field)
