"""/v1/states: what the model remembers of a prompt, as an object to go on from.

A key sees its own states alone; every other is as if it were not there.
"""

from __future__ import annotations

import re
from typing import cast

from fastapi import APIRouter, Request
from starlette.responses import Response

from srm.errors import NotFound
from srm.server.dialects.completions.models import Models
from srm.server.generation.engine_request import of_current_request
from srm.server.generation.prompts import encode_prompts
from srm.server.generation.states import States, to_file
from srm.server.http.bodies import json_reply, read_body
from srm.server.http.request_log import CURRENT
from srm.server.http.responses import add_body_route
from srm.server.schema.completion_request import CompletionRequest
from srm.server.schema.json_parts import TokenIds
from srm.server.schema.openapi import BodySchema, Operation
from srm.server.schema.states import (
    STATE_ID,
    StateDeleted,
    StateList,
    StateObject,
    StateQuery,
    StateRequest,
    parse_state_request,
)
from srm.server.schema.validation import from_text
from srm.server.storage.states import StateRecord
from srm.server.text.text import Text

_ID = {"state_id": "The id of a state."}
_EXAMPLES = {"Read a prompt": {"prompt": "Question: Ava has 6 boxes", "ttl_s": 3600}}
OPERATIONS = (
    Operation("POST", "/v1/states", "Read a prompt and keep the state after it.", StateObject,
              body=BodySchema(StateRequest, {"prompt": (str, TokenIds)}, examples=_EXAMPLES),
              errors=(403, 404, 409, 507)),
    Operation("GET", "/v1/states", "The states there are, newest first.", StateList,
              query=StateQuery, errors=(400,)),
    Operation("GET", "/v1/states/{state_id}", "What is known of a state.", StateObject,
              parameters=_ID, errors=(404,)),
    Operation("DELETE", "/v1/states/{state_id}", "Delete a state.", StateDeleted,
              parameters=_ID, errors=(404, 507)),
    Operation("GET", "/v1/states/{state_id}/content", "A state as a safetensors file.",
              ("application/octet-stream",), parameters=_ID, errors=(404,)),
    Operation("PUT", "/v1/states/{state_id}/content",
              "Take such a file, of this server or of another one with the same weights.",
              StateObject, parameters=_ID, errors=(400, 403, 404, 409, 413, 507)),
)  # fmt: skip


def add_routes(
    router: APIRouter, states: States, models: Models, text: Text, max_body_bytes: int
) -> None:
    """Add the routes of this module."""

    async def create(body: bytes) -> StateObject:
        asked, owner = parse_state_request(body), of_current_request()
        models.check(asked.model)
        begun = None
        if asked.state is not None:
            begun = await states.given(asked.state, owner, asked.refeed)
        prompt = CompletionRequest(
            prompt=cast("list[str] | list[bytes]", [b"" if asked.prompt is None else asked.prompt]),
            add_special_tokens=asked.add_special_tokens,
        )
        (token_ids,) = await encode_prompts(prompt, text, begun)
        record = await states.make(token_ids, owner, begun, asked.metadata, asked.ttl_s)
        entry = CURRENT.get(None)
        if entry is not None and entry.account is not None:
            entry.account.charge(record.num_tokens)
        return _object(record)

    add_body_route(router, "/v1/states", create, max_body_bytes)

    @router.get("/v1/states")
    async def list_states(request: Request) -> Response:
        query = from_text(StateQuery, request.query_params.multi_items())
        records = await states.list(of_current_request(), query.limit + 1, query.after)
        listed = [_object(record) for record in records[: query.limit]]
        ends = (listed[0].id, listed[-1].id) if listed else (None, None)
        has_more = len(records) > query.limit
        return json_reply(
            StateList(data=listed, first_id=ends[0], last_id=ends[1], has_more=has_more)
        )

    @router.get("/v1/states/{state_id}")
    async def get_state(state_id: str) -> Response:
        record, _ = await states.get(state_id, of_current_request())
        return json_reply(_object(record))

    @router.delete("/v1/states/{state_id}")
    async def delete_state(state_id: str) -> Response:
        await states.delete(state_id, of_current_request())
        return json_reply(StateDeleted(id=state_id))

    @router.get("/v1/states/{state_id}/content")
    async def content(state_id: str) -> Response:
        file = to_file(*await states.get(state_id, of_current_request()))
        return Response(file, media_type="application/octet-stream")

    @router.put("/v1/states/{state_id}/content")
    async def put(state_id: str, request: Request) -> Response:
        if not re.match(STATE_ID, state_id):
            raise NotFound(
                f"there can be no state {state_id[:80]!r}: the id is state_ and 32 hexadecimal "
                "digits",
                "state_id",
            )
        file = await read_body(request, states.most_file_bytes)
        return json_reply(_object(await states.put(state_id, file, of_current_request())))


def _object(record: StateRecord) -> StateObject:
    return StateObject(
        id=record.id,
        created_at=record.created_at,
        expires_at=record.expires_at,
        tokens=record.num_tokens,
        bytes=record.num_bytes,
        fingerprint=record.fingerprint,
        arithmetic=record.arithmetic,
        metadata=record.metadata,
    )
