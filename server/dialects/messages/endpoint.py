"""POST /v1/messages and /count_tokens below it: a chat in the form of Anthropic's clients."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from srm.errors import InvalidRequest
from srm.server.dialects.chat.endpoint import Chat, render
from srm.server.dialects.chat.tokenize import MAX_CHARACTERS
from srm.server.dialects.completions.models import Models
from srm.server.dialects.messages.format import MessageFormat
from srm.server.dialects.messages.reply import (
    EVENTS,
    MessageReply,
    TextBlock,
    TokenCount,
    ToolUseBlock,
)
from srm.server.dialects.messages.request import (
    MESSAGE_NEUTRAL,
    TURNS_FORMS,
    CountRequest,
    MessageRequest,
    naming_as_here,
    parse_count,
    parse_message,
)
from srm.server.generation.engine_request import RequestOwner
from srm.server.http.bodies import parsed
from srm.server.reply.responder import Endpoint, Responder
from srm.server.schema.openapi import BodySchema, Operation
from srm.server.text.chat_template import ChatTemplate
from srm.server.text.text import Text

_TURNS = [{"role": "user", "content": "Ava has 3 boxes with 4 pens each. How many pens?"}]
_EXAMPLES = {
    "One answer": {"messages": _TURNS, "max_tokens": 64, "temperature": 0},
    "A stream": {"system": "Count.", "messages": _TURNS, "max_tokens": 64, "stream": True},
}
COUNT_PATH = "/v1/messages/count_tokens"
OPERATIONS = (
    Operation("POST", "/v1/messages", "An answer in Anthropic's form, whole or as a stream.",
              MessageReply, events=EVENTS,
              body=BodySchema(MessageRequest, {"messages": TURNS_FORMS}, MESSAGE_NEUTRAL,
                              _EXAMPLES),
              parts=(TextBlock, ToolUseBlock), errors=(404, 504)),
    Operation("POST", COUNT_PATH, "How many tokens the same request would begin with.", TokenCount,
              body=BodySchema(CountRequest, {"messages": TURNS_FORMS}, MESSAGE_NEUTRAL,
                              {"One question": {"messages": _TURNS}}),
              errors=(404, 504)),
)  # fmt: skip


class Messages(Endpoint):
    """Answers message requests for one model."""

    path = "/v1/messages"
    id_prefix = "msg_"

    def __init__(
        self,
        text: Text,
        models: Models,
        chat: Chat,
        template: ChatTemplate | None,
        responder: Responder,
    ) -> None:
        super().__init__(responder)
        self._text = text
        self._models = models
        self._chat = chat
        self._template = template
        self._counting = ThreadPoolExecutor(1, thread_name_prefix="counts")
        """One thread: long texts take much memory."""

    async def begin(self, body: bytes, id: str, owner: RequestOwner) -> MessageFormat:
        request = await parsed(parse_message, body)
        with naming_as_here():
            generation = await self._chat.start(id, request, owner)
        return MessageFormat(generation, request.calls)

    async def count(self, body: bytes) -> TokenCount:
        """Return how many tokens a request begins with. Raises the RequestError to answer with."""
        request = await parsed(parse_count, body)
        self._models.check(request.model)
        if not self._text.has_tokenizer:
            raise InvalidRequest("messages cannot be counted: this model has no tokenizer")
        with naming_as_here():
            prompt = await render(self._template, request.conversation)
        assert isinstance(prompt, str)  # messages of this form have no token ids
        if len(prompt) > MAX_CHARACTERS:
            raise InvalidRequest(
                f"messages have {len(prompt)} characters; at most {MAX_CHARACTERS} are counted",
                "messages",
            )
        loop = asyncio.get_running_loop()
        (ids,) = await loop.run_in_executor(self._counting, self._text.encode, [prompt], False)
        return TokenCount(len(ids) // 4)
