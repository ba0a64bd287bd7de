"""/v1/responses: a chat in the form that OpenAI's newer clients send by default.

A response that is stored is a state with what was said up to it. The next one goes on from its
tokens if what stands before them is the same, such as instructions, and else from its messages.

One in the background is stored as in progress before its client hears of it. It ends once, as what
happens first: made, failed, cancelled or deleted, by whichever process.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from hashlib import blake2b
from typing import Any, Literal

import msgspec
from msgspec import Raw
from starlette.responses import Response as HttpResponse

from srm.errors import EngineUnavailable, InvalidRequest, SRMError, StoreError
from srm.server import errors
from srm.server.dialects.chat.endpoint import Chat
from srm.server.dialects.chat.request import ChatRequest
from srm.server.dialects.responses.format import ResponsesFormat
from srm.server.dialects.responses.items import INPUT_FORMS, OutputCall, OutputMessage
from srm.server.dialects.responses.reply import EVENTS, Response, ResponseDeleted, ResponseError
from srm.server.dialects.responses.request import (
    RESPONSE_NEUTRAL,
    ResponseRequest,
    chat_messages,
    chat_of_response,
    naming_as_here,
    parse_response,
)
from srm.server.generation.engine_request import RequestOwner, of_current_request
from srm.server.generation.states import States
from srm.server.http.bodies import json_reply, parsed
from srm.server.http.request_log import CURRENT
from srm.server.http.responses import add_operations
from srm.server.reply.responder import Endpoint, Responder
from srm.server.schema.openapi import BodySchema, Operation, Router
from srm.server.schema.validation import Fields
from srm.server.text.text import Text

log = logging.getLogger(__name__)


class ResponseQuery(Fields, frozen=True, kw_only=True):
    """The query of GET /v1/responses/{response_id}."""

    stream: Literal["false"] = "false"
    """A stored response comes whole: only POST /v1/responses streams."""


_ID = {"response_id": "The id of a response that was stored."}
_QUESTION = "Ava has 3 boxes with 4 pens each. How many pens?"
_EXAMPLES = {
    "One answer": {"input": _QUESTION, "max_output_tokens": 64, "temperature": 0},
    "A stream": {
        "instructions": "Count.",
        "input": [{"role": "user", "content": _QUESTION}],
        "max_output_tokens": 64,
        "stream": True,
    },
}
OPERATIONS = (
    Operation("POST", "/v1/responses", "An answer in OpenAI's newer form, whole or as a stream.",
              Response, events=EVENTS,
              body=BodySchema(ResponseRequest, {"input": INPUT_FORMS}, RESPONSE_NEUTRAL, _EXAMPLES),
              parts=(OutputMessage, OutputCall), errors=(403, 404, 409, 504, 507)),
    Operation("GET", "/v1/responses/{response_id}", "A response that was stored.", Response,
              parameters=_ID, query=ResponseQuery, errors=(400, 404),
              queries={"include[]": "Accepted and not used: it comes as it was made."}),
    Operation("DELETE", "/v1/responses/{response_id}", "Delete a stored response.",
              ResponseDeleted, parameters=_ID, errors=(404, 507)),
    Operation("POST", "/v1/responses/{response_id}/cancel",
              "End a response that is made in the background.", Response, parameters=_ID,
              errors=(404, 507)),
)  # fmt: skip


class Turn(msgspec.Struct, frozen=True):
    """The parts of a stored response besides its tokens."""

    reply: Raw
    messages: list[dict[str, Any]] = []
    """Those of a chat up to its answer, without the instructions; none unless it was made."""
    made_with: str = ""
    """Digest of what the tokens begin with, and of the vocabulary."""


_decode_turn = msgspec.json.Decoder(Turn).decode


class Responses(Endpoint):
    """Answers response requests for one model."""

    path = "/v1/responses"
    id_prefix = "resp_"

    def __init__(
        self, chat: Chat, text: Text, responder: Responder, states: States | None = None
    ) -> None:
        """Without `states` requests that name a response, or are to store theirs, are refused."""
        super().__init__(responder)
        self._chat = chat
        self._vocabulary = blake2b("\n".join(text.labels).encode()).hexdigest()
        self._states = states

    async def answer(self, body: bytes) -> HttpResponse:
        id, owner = self.make_id(), of_current_request()
        form = await self.begin(body, id, owner)
        if not form.asked.background:
            return await self._responder.respond(form)
        beginning = msgspec.json.encode(form.greeting()[0].response)
        states, make = self._store("background"), partial(self._responder.render_whole, form)
        await states.begin(id, owner, _turn(beginning))
        task = asyncio.create_task(make_in_background(states, id, owner, beginning, make))
        task.add_done_callback(lambda _: states.release(id))
        CURRENT.get().goes_on = task
        await asyncio.sleep(0)  # the engine gets it before anybody can cancel it
        return json_reply(beginning)

    async def begin(self, body: bytes, id: str, owner: RequestOwner) -> ResponsesFormat:
        asked, given = await parsed(parse_response, body)
        earlier, turn = None, Turn(Raw())
        if (previous := asked.previous_response_id) is not None:
            field = "previous_response_id"
            earlier = await self._store(field).given(previous, owner, True, field)
            turn = _decode_turn(earlier.turn or b"")
            if not earlier.token_ids:
                raise errors.Conflict(
                    f"response {previous} is not made, or has failed or was cancelled: "
                    f"GET {self.path}/{previous} says which",
                    field,
                )
        if asked.store:
            self._store("store")
            if owner.durable:  # a line that is sent again would store another
                raise InvalidRequest("store = true is not for lines of a batch", "store")
        request = exact = await parsed(
            lambda _: chat_of_response(asked, given, turn.messages), body
        )
        if asked.background:  # a name by which any process can end it
            request = exact = msgspec.structs.replace(request, request_id=id)
        made_with = self._digest(asked, request)
        if earlier is not None and turn.made_with == made_with:
            last = len(turn.messages) - 1 + bool(asked.instructions)
            exact = _with_ids(request, last, earlier.token_ids)
        with naming_as_here():
            try:
                generation = await self._chat.start(id, exact, owner, earlier)
            except InvalidRequest:
                if exact is request:
                    raise
                # The template does not show where the answer with these ids ends.
                generation = await self._chat.start(id, request, owner, earlier)
        form = ResponsesFormat(generation, asked, request.calls)

        async def keep(reply: bytes) -> None:
            messages = [*chat_messages(asked, turn.messages), form.message]
            stored = msgspec.json.encode(Turn(Raw(reply), messages, made_with))
            token_ids = generation.prompts[0].token_ids + form.sampled
            own = owner, generation.begun, Raw(stored)
            await self._store("store").keep(id, token_ids, *own, is_pending=asked.background)

        form.keep = keep if asked.store else None
        return form

    def _store(self, field: str) -> States:
        if self._states is None:
            raise InvalidRequest(f"{field} is for `srm serve`, which stores responses", field)
        return self._states

    def _digest(self, asked: ResponseRequest, request: ChatRequest) -> str:
        chat = request.conversation
        own = asked.instructions or "", chat.chat_template_kwargs, chat.tools, chat.tells_tools
        return blake2b(msgspec.json.encode([*own, self._vocabulary])).hexdigest()


def _with_ids(request: ChatRequest, i: int, token_ids: bytes) -> ChatRequest:
    """Return a chat in which these ids are all tokens up to the end of a message."""
    ids = Raw(msgspec.json.encode(memoryview(token_ids).cast("i").tolist()))
    message = msgspec.structs.replace(request.messages[i], generation_token_ids=ids)
    messages = [*request.messages[:i], message, *request.messages[i + 1 :]]
    return msgspec.structs.replace(request, messages=messages)


async def make_in_background(
    states: States,
    id: str,
    owner: RequestOwner,
    beginning: bytes,
    make: Callable[[], Awaitable[object]],
) -> None:
    """Make a response, which `make` keeps in place of its `beginning`, or keep why it failed."""
    try:
        await make()
        return
    except asyncio.CancelledError:  # by a stop
        body = errors.body_of(errors.stopping())
    except SRMError as error:
        body = errors.body_of(error)
    except Exception:
        log.exception("response %s failed", id)
        body = errors.INTERNAL
    try:
        await states.end(id, owner, _turn(_ended(beginning, "failed", body)))
    except StoreError as error:  # whoever asks sees that nobody makes it any more
        log.warning("response %s failed, which could not be stored: %s", id, error.message)


def add_routes(router: Router, states: States) -> None:
    """Add the routes of responses that were stored."""

    async def stored(id: str) -> tuple[bytes, bool]:
        """Return a response as it is by now, and whether it is being made."""
        record, _ = await states.get(id, of_current_request(), "response_id")
        reply = bytes(_decode_turn(record.turn or b"").reply)
        if not record.is_lost:
            return reply, record.is_pending
        lost = EngineUnavailable("the process that made it has ended, or could not store it")
        return _ended(reply, "failed", errors.body_of(lost)), False

    async def get_response(_query: ResponseQuery, response_id: str) -> HttpResponse:
        reply, _ = await stored(response_id)
        return json_reply(reply)

    async def delete_response(response_id: str) -> ResponseDeleted:
        (_, is_made), owner = await stored(response_id), of_current_request()
        try:
            await states.delete(response_id, owner, "response_id")
        finally:  # though it cannot be stored; not before, since what is cut would be
            if is_made:
                await states.stop(response_id, owner)
        return ResponseDeleted(id=response_id)

    async def cancel_response(response_id: str) -> HttpResponse:
        (reply, is_made), owner = await stored(response_id), of_current_request()
        if is_made:
            try:
                await states.end(response_id, owner, _turn(_ended(reply, "cancelled")))
            finally:
                await states.stop(response_id, owner)
            reply, _ = await stored(response_id)  # which may have been made meanwhile
        return json_reply(reply)

    add_operations(router, OPERATIONS[1:], (get_response, delete_response, cancel_response))


def _turn(reply: bytes) -> Raw:
    return Raw(msgspec.json.encode(Turn(Raw(reply))))


def _ended(reply: bytes, status: str, body: errors.ErrorBody | None = None) -> bytes:
    """Return a response that was in progress with this status, and this error."""
    fields = msgspec.json.decode(reply) | {"status": status}
    if body is not None:
        fields["error"] = ResponseError("server_error", body.error.message, body.error.type)
    return msgspec.json.encode(fields)
