"""POST /v1/responses: a chat in the form that OpenAI's newer clients send by default."""

from __future__ import annotations

from srm.server.dialects.chat.endpoint import Chat
from srm.server.dialects.responses.format import ResponsesFormat
from srm.server.dialects.responses.items import INPUT_FORMS, OutputCall, OutputMessage
from srm.server.dialects.responses.reply import EVENTS, Response
from srm.server.dialects.responses.request import (
    RESPONSE_NEUTRAL,
    ResponseRequest,
    naming_as_here,
    parse_response,
)
from srm.server.generation.engine_request import RequestOwner
from srm.server.http.bodies import parsed
from srm.server.reply.responder import Endpoint, Responder
from srm.server.schema.openapi import BodySchema, Operation

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
              parts=(OutputMessage, OutputCall), errors=(404, 504)),
)  # fmt: skip


class Responses(Endpoint):
    """Answers response requests for one model."""

    path = "/v1/responses"
    id_prefix = "resp_"

    def __init__(self, chat: Chat, responder: Responder) -> None:
        super().__init__(responder)
        self._chat = chat

    async def begin(self, body: bytes, id: str, owner: RequestOwner) -> ResponsesFormat:
        asked, request = await parsed(parse_response, body)
        with naming_as_here():
            generation = await self._chat.start(id, request, owner)
        return ResponsesFormat(generation, asked, request.calls)
