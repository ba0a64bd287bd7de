"""POST /v1/chat/completions: messages through the chat template, and a completion as a message.

All but the prompt and the shape of the reply is shared with completions. Knows the template only as
what makes a prompt.
"""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, Raw

from engine.client.client import EngineClient
from engine.errors import InvalidRequest, RequestError
from server.generation.encoding import Encoder, encode_json
from server.generation.engine_request import RequestOwner
from server.generation.responder import Responder
from server.http.bodies import parsed
from server.routes.completions import Completions
from server.routes.endpoint import Endpoint
from server.routes.models import Models
from server.schema.chat_request import CHAT_NEUTRAL, MESSAGES_FORMS, ChatRequest, parse_chat
from server.schema.chat_response import (
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChunkChoice,
    TokenLogprob,
    TopLogprob,
)
from server.schema.completion_response import Counted, Samples
from server.schema.conversation import Conversation
from server.schema.openapi import BodySchema, Operation
from server.text.chat_template import ChatTemplate
from server.text.logprobs import scored
from server.text.sample import Delta
from server.text.score_columns import ChatScores
from server.text.text import Text

OPERATIONS = (
    Operation("POST", "/v1/chat/completions", "The next message of a chat, whole or as a stream.",
              ChatCompletion, events=ChatChunk,
              body=BodySchema(ChatRequest, {"messages": MESSAGES_FORMS}, CHAT_NEUTRAL),
              parts=(ChatChoice, ChunkChoice, Samples, Counted), errors=(404, 409, 504)),
)  # fmt: skip


class Chat(Endpoint):
    """Answers chat requests for one model."""

    path = "/v1/chat/completions"
    id_prefix = "chatcmpl"

    def __init__(
        self,
        client: EngineClient,
        text: Text,
        models: Models,
        completions: Completions,
        template: ChatTemplate | None,
        responder: Responder,
    ) -> None:
        super().__init__(responder)
        self._client = client
        self._text = text
        self._models = models
        self._completions = completions
        self._template = template

    async def begin(self, body: bytes, id: str, owner: RequestOwner) -> ChatEncoder:
        request = await parsed(parse_chat, body)
        self._models.check(request.model)
        prompt = await render(self._template, request.conversation)
        completion = request.as_completion(prompt, self._text.model.n_ctx)
        try:
            generation = await self._completions.start(id, completion, owner)
        except RequestError as error:
            if error.param == "prompt":  # which the messages made
                error.param = "messages"
            raise
        return ChatEncoder(generation, self._text, self._models.name, self._client)


async def render(template: ChatTemplate | None, chat: Conversation) -> str:
    """The prompt that the messages make. Raises InvalidRequest if they make none."""
    if template is None:
        raise InvalidRequest(
            "messages need a chat template, and this model has none: there is neither a "
            "chat_template.jinja nor a chat_template in tokenizer_config.json, and the server was "
            "started without --chat-template; send a prompt to /v1/completions",
            "messages",
        )
    return await template.render(chat)


class ChatEncoder(Encoder):
    """Encodes a reply as a ChatCompletion, or as ChatChunks."""

    scores = ChatScores
    _has_told_prompt = False

    def whole(self, choice: Delta, is_event: bool) -> Raw:
        fields: dict[str, Any] = {
            "index": choice.index,
            "logprobs": self._logprobs(choice),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "token_ids": self.token_ids(choice),
            "matched": UNSET if choice.matched is None else choice.matched,
        }
        if is_event:
            delta = ChatDelta(role="assistant", content=choice.text)
            return Raw(encode_json(ChunkChoice(delta=delta, **fields)))
        count = UNSET if choice.count is None else choice.count
        message = ChatMessage(content=choice.text)
        return Raw(encode_json(ChatChoice(message=message, count=count, **fields)))

    def begun(self, deltas: list[Delta]) -> list[Raw]:
        """Role, content and end of a choice are in three events, as clients expect them."""
        delta = ChatDelta(role="assistant", content="")
        indices = [one.index for one in deltas if one.is_first]
        return [Raw(encode_json(ChunkChoice(index=index, delta=delta))) for index in indices]

    def news(self, deltas: list[Delta]) -> list[list[Raw]]:
        wants_tokens = self.request.return_token_ids or self.request.logprobs is not None
        said = [
            ChunkChoice(
                index=delta.index,
                delta=ChatDelta(content=delta.text),
                logprobs=self._logprobs(delta),
                token_ids=self.token_ids(delta),
            )
            for delta in deltas
            if delta.text or (wants_tokens and delta.num_tokens)
        ]
        ended = [
            ChunkChoice(
                index=delta.index,
                delta=ChatDelta(),
                finish_reason=delta.finish_reason,
                stop_reason=delta.stop_reason,
            )
            for delta in deltas
            if delta.finish_reason is not None
        ]
        events = [choices for choices in (said, ended) if choices]
        return [[Raw(encode_json(choice)) for choice in choices] for choices in events]

    def around_text(self, index: int) -> tuple[bytes, bytes]:
        choice = encode_json(ChunkChoice(index=index, delta=ChatDelta(content="\0")))
        begin, _, end = choice.partition(b"\\u0000")
        return begin, end

    def envelope(self, fields: dict[str, Any], is_event: bool) -> bytes:
        return encode_json((ChatChunk if is_event else ChatCompletion)(**fields))

    def first_fields(self) -> dict[str, Any]:
        """The prompt's token ids and scores, if asked for and not sent before."""
        if self._has_told_prompt:
            return {}
        self._has_told_prompt = True
        fields, prompt = {}, self.generation.prompts[0]
        if self.request.return_token_ids:
            fields["prompt_token_ids"] = prompt.token_ids_json
        if self.request.prompt_logprobs is not None:
            fields["prompt_logprobs"] = prompt.logprobs_json
        return fields

    def _logprobs(self, delta: Delta) -> ChatLogprobs | None:
        alternatives = self.request.logprobs
        if alternatives is None:
            return None
        return ChatLogprobs(
            [
                TokenLogprob(
                    self.name(token),
                    logprob,
                    self._bytes(token),
                    [TopLogprob(self.name(other), p, self._bytes(other)) for other, p in top],
                )
                for token, logprob, top in scored(delta, alternatives)
            ]
        )

    def _bytes(self, token: int) -> list[int] | None:
        return list(self.text.pieces(token.to_bytes(4, "little"))[0]) or None
