"""What trainers have engines do between rollouts: pause, resume, end requests, change weights.

Both dialects (`vllm.py`, `sglang.py`) have routes for each: an operation and an action.
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from typing import Any, cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from srm.engine.client.client import EngineClient
from srm.engine.messages import DropPrefixes, EndRequests, Pause, Resume, Running, Status
from srm.server.generation.engine_request import of_current_request
from srm.server.http.bodies import read_body
from srm.server.http.responses import WhileConnected
from srm.server.schema.openapi import BodySchema, Operation, Router
from srm.server.schema.validation import Fields, checked, from_text, given_fields, require

MAX_BODY_BYTES = 1024 * 1024
"""More than the most ids of `AbortRequests` take, each of the most characters."""
Action = Callable[[Any], Awaitable[msgspec.Struct]]
"""Makes the reply to a request's body, or to its query if it has no body. Raises the SRMError to
answer with."""

ChangeWeights = Callable[[str, Running, str], Awaitable[int]]
"""Has the engines go on with the weights of a folder, as the operator's route does: path, what
running sequences do, what the trainer calls them. Returns their version."""


class Nothing(Fields, frozen=True, kw_only=True):
    """A body or a query without fields."""


class TrainerControl:
    """The engines of one server, for their trainer."""

    def __init__(self, client: EngineClient, change: ChangeWeights, lease_s: float) -> None:
        """`lease_s`: seconds after which a pause that nobody ends or renews is over."""
        self.client = client
        self.change = change
        self._lease_s = lease_s

    async def status(self) -> Status:
        """The engines' status, whichever process has just changed it. Raises EngineUnavailable
        while none answers."""
        return await self.client.refresh()

    def label(self, status: Status) -> str:
        """What the trainer calls the weights in use, else their number."""
        return self.client.label(status.weights_version)

    async def pause(self, refeeds: bool = False, waits: bool = False) -> None:
        """Have all sequences stand still; returns when no step is under way. `refeeds`: weights
        that are changed meanwhile are fed again what runs; `waits`: what runs ends first, and
        nothing else begins."""
        await self.client.control(Pause(_id(), self._lease_s, refeeds, waits))

    async def resume(self) -> None:
        """Have them go on; nothing if they do."""
        await self.client.control(Resume(_id()))

    async def end(self, names: Iterable[str] | None = None) -> int:
        """End the asking key's requests of these `request_id`s, or everybody's but those of
        batches, each with its tokens so far; returns how many."""
        wanted = None if names is None else frozenset(names)
        share = of_current_request().share
        done = await self.client.control(EndRequests(_id(), wanted, share))
        return int(done.detail["requests"])

    async def drop_prefixes(self) -> None:
        """Forget the kept states of prompts."""
        await self.client.control(DropPrefixes(_id()))


def _id() -> str:
    return uuid.uuid4().hex


def add_actions(
    router: Router, operations: Iterable[Operation], actions: Mapping[str, Action]
) -> None:
    """Add the routes of those operations whose path has an action."""
    for operation in operations:
        if action := actions.get(operation.path):
            route = _route(operation, action)
            router.add_api_route(operation.path, route, methods=[operation.method])


def _route(operation: Operation, action: Action) -> Callable[[Request], Awaitable[Response]]:
    query_kind = cast(type[Fields], operation.query or Nothing)
    body = operation.body or BodySchema(Nothing)
    takes_all = operation.method == "GET" and operation.query is None

    async def answer(request: Request) -> Response:
        asked: Fields = Nothing()
        if not takes_all:
            query = from_text(query_kind, request.query_params.multi_items())
            asked = await read_fields(request, body)
            asked = asked if operation.body else query
        return WhileConnected(partial(action, asked))

    return answer


async def read_fields(request: Request, schema: BodySchema) -> Fields:
    """Return the body, which may be empty where no field is required. Raises InvalidRequest."""
    body = await read_body(request, MAX_BODY_BYTES)
    kind = cast(type[Fields], schema.kind)
    given = given_fields(body, kind, schema.neutral) if body.strip() else {}
    for field in msgspec.structs.fields(kind):
        if field.required:
            require(given, field.encode_name)
    return checked(kind, given, {}, schema.neutral)
