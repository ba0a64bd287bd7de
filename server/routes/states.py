"""/v1/states: what the model remembers of a prompt, as an object to go on from.

A key sees its own states alone; every other is as if it were not there.
"""

from __future__ import annotations

import re
from typing import Annotated

import msgspec
from fastapi import APIRouter, Request
from msgspec import Meta
from starlette.responses import Response

from srm.engine.state_file import to_file
from srm.errors import InvalidRequest, NotFound
from srm.server.dialects.chat.endpoint import render
from srm.server.dialects.chat.request import CHAT_FORMS
from srm.server.dialects.chat.tokenize import ReadRequest, chat_fields
from srm.server.dialects.completions.models import Models
from srm.server.generation.engine_request import of_current_request
from srm.server.generation.prompts import encode_prompts
from srm.server.generation.states import States
from srm.server.http.bodies import json_reply, parsed, read_body
from srm.server.http.responses import add_operations
from srm.server.schema.completion_request import CompletionRequest
from srm.server.schema.json_parts import TokenIds
from srm.server.schema.openapi import BodySchema, Operation
from srm.server.schema.sampling_fields import STATE_ID, Metadata, StateId
from srm.server.schema.states import (
    DEFAULT_TTL_S,
    MAX_TTL_S,
    StateDeleted,
    StateList,
    StateObject,
    StateQuery,
    prompt_of,
)
from srm.server.schema.validation import checked, given_fields, naming
from srm.server.storage.states import StateRecord
from srm.server.text.chat_template import ChatTemplate
from srm.server.text.text import Text


class StateRequest(ReadRequest, frozen=True, kw_only=True):
    """Body of POST /v1/states, checked."""

    prompt: str | bytes | None = None
    """Text or token ids to read; with `state`, what follows it."""
    state: StateId | None = None
    """Go on from this state, with whose tokens a chat must begin."""
    refeed: bool = False
    """Feed the tokens of the state, if other weights made it."""
    metadata: Metadata = msgspec.field(default_factory=dict)
    """Labels, which are returned."""
    ttl_s: Annotated[int, Meta(ge=1, le=MAX_TTL_S)] = DEFAULT_TTL_S
    """Seconds until the state is deleted."""

    def check(self) -> None:
        super().check()
        if self.state is None and self.prompt is None and self.messages is None:
            raise InvalidRequest("send prompt, text or token ids, or messages, or state", "prompt")
        if self.refeed and self.state is None:
            raise InvalidRequest("refeed = true needs a state", "refeed")


_FILE = "application/octet-stream"
_ID = {"state_id": "The id of a state."}
_EXAMPLES = {"Read a prompt": {"prompt": "Question: Ava has 6 boxes", "ttl_s": 3600}}
OPERATIONS = (
    Operation("POST", "/v1/states", "Read a prompt and keep the state after it.", StateObject,
              body=BodySchema(StateRequest, {"prompt": (str, TokenIds), **CHAT_FORMS},
                              examples=_EXAMPLES),
              errors=(403, 404, 409, 507)),
    Operation("GET", "/v1/states", "The states there are, newest first.", StateList,
              query=StateQuery, errors=(400,)),
    Operation("GET", "/v1/states/{state_id}", "What is known of a state.", StateObject,
              parameters=_ID, errors=(404,)),
    Operation("DELETE", "/v1/states/{state_id}", "Delete a state.", StateDeleted,
              parameters=_ID, errors=(404, 507)),
    Operation("GET", "/v1/states/{state_id}/content", "A state as a safetensors file.",
              (_FILE,), parameters=_ID, errors=(404,)),
    Operation("PUT", "/v1/states/{state_id}/content",
              "Take such a file, of this server or of another one with the same weights.",
              StateObject, parameters=_ID, errors=(400, 403, 404, 409, 413, 507)),
)  # fmt: skip


def parse_state_request(body: bytes) -> StateRequest:
    """Check the body of POST /v1/states. Raises InvalidRequest naming field and value."""
    given = given_fields(body, StateRequest, {})
    return checked(StateRequest, given, {**prompt_of(given), **chat_fields(given)}, {})


def add_routes(
    router: APIRouter,
    states: States,
    models: Models,
    text: Text,
    template: ChatTemplate | None,
    max_body_bytes: int,
) -> None:
    """Add the routes of this module."""

    async def create(body: bytes) -> StateObject:
        asked, owner = await parsed(parse_state_request, body), of_current_request()
        models.check(asked.model)
        begun = None
        if asked.state is not None:
            begun = await states.given(asked.state, owner, asked.refeed)
        chat = asked.conversation
        prompt = await render(template, chat) if chat else asked.prompt
        reading = CompletionRequest(
            prompt=[b"" if prompt is None else prompt],  # type: ignore[arg-type]  # of any kind
            add_special_tokens=asked.adds_special_tokens,
        )
        with naming({} if chat is None else {"prompt": "messages"}, {}):
            (token_ids,) = await encode_prompts(reading, text, begun, chat is not None)
        owner.charge(len(token_ids) // 4)  # whether it is waited for or not
        return _object(await states.make(token_ids, owner, begun, asked.metadata, asked.ttl_s))

    async def list_states(query: StateQuery) -> StateList:
        records = await states.list(of_current_request(), query.limit + 1, query.after)
        return StateList.begin([*map(_object, records)], query.limit)

    async def get_state(state_id: str) -> StateObject:
        record, _ = await states.get(state_id, of_current_request(), "state_id")
        return _object(record)

    async def delete_state(state_id: str) -> StateDeleted:
        await states.delete(state_id, of_current_request(), "state_id")
        return StateDeleted(id=state_id)

    actions = (create, list_states, get_state, delete_state)
    add_operations(router, OPERATIONS[:4], actions, max_body_bytes)

    @router.get("/v1/states/{state_id}/content")
    async def content(state_id: str) -> Response:
        record, own = await states.get(state_id, of_current_request(), "state_id")
        return Response(to_file(own, record.fingerprint, record.arithmetic), media_type=_FILE)

    @router.put("/v1/states/{state_id}/content")
    async def put(state_id: str, request: Request) -> Response:
        if not re.match(STATE_ID, state_id):
            raise NotFound(
                f"there can be no state {state_id[:80]!r}: the id is state_ and 32 hexadecimal "
                "digits",
                "state_id",
            )
        file = await read_body(request, states.most_file_bytes, _FILE)
        return json_reply(_object(await states.put(state_id, file, of_current_request())))


def _object(record: StateRecord) -> StateObject:
    return msgspec.convert(record, StateObject, from_attributes=True)
