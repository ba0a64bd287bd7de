"""POST /v1/chat/completions, and /batch below it: messages through the chat template, and a
completion as a message.

All but the prompt and the shape of the reply is shared with completions.
"""

from __future__ import annotations

import msgspec

from srm.errors import InvalidRequest
from srm.server.dialects.chat.format import ChatFormat, ChatsFormat
from srm.server.dialects.chat.reply import (
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChunkChoice,
)
from srm.server.dialects.chat.request import (
    CHAT_FORMS,
    CHATS_FORMS,
    ChatRequest,
    ChatsRequest,
    parse_chat,
    parse_chats,
)
from srm.server.dialects.chat.tools import ToolFormat
from srm.server.dialects.completions.endpoint import Completions
from srm.server.dialects.completions.models import Models
from srm.server.generation.engine_request import RequestOwner
from srm.server.generation.generation import Generation
from srm.server.generation.prompts import GivenState
from srm.server.http.bodies import parsed
from srm.server.reply.responder import Endpoint, Responder
from srm.server.schema.completion_request import CompletionRequest
from srm.server.schema.completion_response import Counted, Samples
from srm.server.schema.conversation import Conversation, ExactPrompt, naming_chat
from srm.server.schema.openapi import BodySchema, Operation
from srm.server.schema.sampling_fields import NEUTRAL
from srm.server.schema.structured_outputs import ConstraintSource
from srm.server.schema.validation import naming
from srm.server.schema.verify import VERIFY_FORMS
from srm.server.text.chat_template import ChatTemplate
from srm.server.text.text import Text

_MESSAGES = [{"role": "user", "content": "Ava has 3 boxes with 4 pens each. How many pens?"}]
_EXAMPLES = {
    "One answer": {"messages": _MESSAGES, "max_completion_tokens": 64, "temperature": 0},
    "A hundred answers, counted": {
        "messages": _MESSAGES,
        "max_completion_tokens": 64,
        "n": 100,
        "until": {"match": r"#### (\d+)"},
        "return": "counts",
        "count_by": "group",
    },
}
OPERATIONS = (
    Operation("POST", "/v1/chat/completions", "The next message of a chat, whole or as a stream.",
              ChatCompletion, events=ChatChunk,
              body=BodySchema(ChatRequest, {**CHAT_FORMS, "verify": VERIFY_FORMS},
                              NEUTRAL, _EXAMPLES),
              parts=(ChatChoice, ChunkChoice, Samples, Counted),
              errors=(404, 409, 504)),
    Operation("POST", "/v1/chat/completions/batch", "The next message of each of several chats.",
              ChatCompletion,
              body=BodySchema(ChatsRequest,
                              {**CHAT_FORMS, "messages": CHATS_FORMS, "verify": VERIFY_FORMS},
                              NEUTRAL, {"Two answers": {"messages": [_MESSAGES] * 2}}),
              parts=(ChatChoice, Samples, Counted),
              errors=(404, 409, 504)),
)  # fmt: skip


class Chat(Endpoint):
    """Answers chat requests for one model."""

    path = "/v1/chat/completions"
    id_prefix = "chatcmpl-"

    def __init__(
        self,
        text: Text,
        models: Models,
        completions: Completions,
        template: ChatTemplate | None,
        responder: Responder,
    ) -> None:
        super().__init__(responder)
        self._text = text
        self._models = models
        self._completions = completions
        self._template = template

    async def begin(self, body: bytes, id: str, owner: RequestOwner) -> ChatFormat:
        request = await parsed(parse_chat, body)
        generation = await self.start(id, request, owner)
        if (calls := request.calls) is not None:
            return ToolFormat(generation, calls)
        form = ChatFormat(generation)
        form.echoed = request.echoed
        return form

    async def start(
        self,
        id: str,
        request: ChatRequest,
        owner: RequestOwner,
        earlier: GivenState | None = None,
    ) -> Generation:
        """Make a request ready to run; as `Completions.start` from an `earlier` state. Raises the
        RequestError to answer with."""
        self._models.check(request.model)
        prompt = await render(self._template, request.conversation)
        completion = request.as_completion(prompt, self._text.model.n_ctx)
        calls = request.calls
        source = None if calls is None else calls.source
        return await self._start(id, completion, owner, source, earlier)

    async def _start(
        self,
        id: str,
        completion: CompletionRequest,
        owner: RequestOwner,
        source: ConstraintSource | None = None,
        earlier: GivenState | None = None,
    ) -> Generation:
        with naming({"prompt": "messages"}, {}):  # the messages made it
            return await self._completions.start(
                id, completion, owner, source, earlier, are_chats=True
            )


class ManyChats(Chat):
    """Answers requests of several chats, in the shape of vLLM."""

    path = "/v1/chat/completions/batch"

    async def begin(self, body: bytes, id: str, owner: RequestOwner) -> ChatFormat:
        request = await parsed(parse_chats, body)
        self._models.check(request.model)
        prompts = []
        for i, chat in enumerate(request.conversations):
            with naming_chat(i):
                prompt = await render(self._template, chat)
            if isinstance(prompt, ExactPrompt):
                source = prompt.source.replace("messages", f"messages[{i}]")
                prompt = msgspec.structs.replace(prompt, source=source)
            prompts.append(prompt)
        first = request.first.as_completion(prompts[0], self._text.model.n_ctx)
        completion = msgspec.structs.replace(first, prompt=prompts)
        completion.check()
        generation = await self._start(id, completion, owner)
        return ChatsFormat(generation)


async def render(template: ChatTemplate | None, chat: Conversation) -> str | ExactPrompt:
    """The prompt that the messages make. Raises InvalidRequest if they make none."""
    if template is None:
        raise InvalidRequest(
            "messages need a chat template, and this model has none: there is neither a "
            "chat_template.jinja nor a chat_template in tokenizer_config.json, and the server was "
            "started without --chat-template; send a prompt to /v1/completions",
            "messages",
        )
    return await template.render(chat)
