"""POST /v1/chat/completions: messages through the chat template, and a completion as a message.

All but the prompt and the shape of the reply is shared with completions. Knows the template only as
what makes a prompt.
"""

from __future__ import annotations

import uuid

import msgspec
from fastapi import APIRouter, Request
from msgspec import UNSET, Raw, UnsetType
from starlette.responses import Response

from engine.client.client import EngineClient
from engine.errors import InvalidRequest, RequestError
from server.generation.generation import Generation
from server.generation.request_owner import RequestOwner, of_current_request
from server.generation.responder import Responder, SamplesField, UsageField
from server.generation.weights_version import origin
from server.http.bodies import read_body
from server.http.responses import WhileConnected
from server.routes.completions import Completions
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
from server.schema.completion_response import Counted, Samples, Usage
from server.schema.conversation import Conversation
from server.schema.openapi import Body, Operation
from server.text.chat_template import ChatTemplate
from server.text.logprobs import naming, scored
from server.text.sample import Delta
from server.text.text import Text

OPERATIONS = (
    Operation(
        method="POST",
        path="/v1/chat/completions",
        summary="The next message of a chat, whole or as a stream.",
        body=Body(kind=ChatRequest, forms={"messages": MESSAGES_FORMS}, neutral=CHAT_NEUTRAL),
        reply=ChatCompletion,
        events=ChatChunk,
        parts=(ChatChoice, ChunkChoice, Samples, Counted),
        errors=(404, 409, 504),
    ),
)

_encode = msgspec.json.Encoder().encode


class Chat:
    """Answers chat requests for one model."""

    def __init__(
        self,
        client: EngineClient,
        text: Text,
        models: Models,
        completions: Completions,
        template: ChatTemplate | None,
        answers: Responder,
    ) -> None:
        self._client = client
        self._answers = answers
        self._text = text
        self._models = models
        self._completions = completions
        self._template = template

    async def answer(self, body: bytes) -> Response:
        """The reply to a body. Raises the RequestError to answer with."""
        generation = await self._start(body, f"chatcmpl-{uuid.uuid4().hex}", of_current_request())
        return await self._answers.respond(generation, self._shape(generation))

    async def whole(self, body: bytes, id: str, sender: RequestOwner) -> bytes:
        """Return the JSON of the reply to a body without `stream`, for callers without a
        connection. Raises the SRMError to answer with."""
        generation = await self._start(body, id, sender)
        return await self._answers.whole(generation, self._shape(generation))

    async def _start(self, body: bytes, id: str, sender: RequestOwner) -> Generation:
        request = parse_chat(body)
        self._models.check(request.model)
        prompt = await render(self._template, request.conversation)
        completion = request.as_completion(prompt, self._text.model.n_ctx)
        try:
            return await self._completions.start(id, completion, sender)
        except RequestError as error:
            if error.param == "prompt":  # which the messages made
                error.param = "messages"
            raise

    def _shape(self, generation: Generation) -> ChatShape:
        return ChatShape(generation, self._text, self._models.name, self._client)


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


class ChatShape:
    """A reply as a ChatCompletion, or as ChatChunks."""

    def __init__(
        self, generation: Generation, text: Text, model_name: str, client: EngineClient
    ) -> None:
        request = generation.request
        self._generation = generation
        self._text = text
        self._model_name = model_name
        self._client = client
        self._name = naming(text, request.return_tokens_as_token_ids)
        self._wants_tokens = request.return_token_ids or request.logprobs is not None
        self._has_told_prompt = False

    def choice(self, whole: Delta) -> Raw:
        choice = ChatChoice(
            index=whole.index,
            message=ChatMessage(content=whole.text),
            logprobs=self._logprobs(whole),
            finish_reason=whole.finish_reason,
            stop_reason=whole.stop_reason,
            token_ids=self._token_ids(whole),
            matched=UNSET if whole.matched is None else whole.matched,
            count=UNSET if whole.count is None else whole.count,
        )
        return Raw(_encode(choice))

    def whole_news(self, whole: Delta) -> Raw:
        choice = ChunkChoice(
            index=whole.index,
            delta=ChatDelta(role="assistant", content=whole.text),
            logprobs=self._logprobs(whole),
            finish_reason=whole.finish_reason,
            stop_reason=whole.stop_reason,
            token_ids=self._token_ids(whole),
            matched=UNSET if whole.matched is None else whole.matched,
        )
        return Raw(_encode(choice))

    def reply(self, choices: list[Raw], usage: Usage, samples: SamplesField) -> bytes:
        made = origin(self._client, self._generation)
        token_ids, logprobs = self._of_prompt()
        return _encode(
            ChatCompletion(
                id=self._generation.id,
                created=self._generation.created_unix,
                model=self._model_name,
                choices=choices,
                usage=usage,
                system_fingerprint=made.fingerprint,
                weights_version=made.version,
                first_weights_version=made.first_version,
                prompt_token_ids=token_ids,
                prompt_logprobs=logprobs,
                samples=samples,
            )
        )

    def begun(self, deltas: list[Delta]) -> list[Raw]:
        """Role, content and end of a choice are in three events, as clients expect them."""
        delta = ChatDelta(role="assistant", content="")
        indices = [one.index for one in deltas if one.is_first]
        return [Raw(_encode(ChunkChoice(index=index, delta=delta))) for index in indices]

    def news(self, deltas: list[Delta]) -> list[list[Raw]]:
        said = [
            ChunkChoice(
                index=delta.index,
                delta=ChatDelta(content=delta.text),
                logprobs=self._logprobs(delta),
                token_ids=self._token_ids(delta),
            )
            for delta in deltas
            if delta.text or (self._wants_tokens and delta.num_tokens)
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
        return [
            [Raw(_encode(choice)) for choice in choices] for choices in (said, ended) if choices
        ]

    def rendering(self) -> None:
        """Return None: a chunk depends on more than its text."""

    def event(self, choices: list[Raw], usage: UsageField, samples: SamplesField = UNSET) -> bytes:
        made = origin(self._client, self._generation)
        token_ids, logprobs = self._of_prompt()
        chunk = ChatChunk(
            id=self._generation.id,
            created=self._generation.created_unix,
            model=self._model_name,
            choices=choices,
            usage=usage,
            system_fingerprint=made.fingerprint,
            weights_version=made.version,
            prompt_token_ids=token_ids,
            prompt_logprobs=logprobs,
            samples=samples,
        )
        return _encode(chunk)

    def _of_prompt(self) -> tuple[Raw | UnsetType, Raw | UnsetType]:
        """Return the prompt's token ids and scores, if asked for and not sent before."""
        if self._has_told_prompt:
            return UNSET, UNSET
        self._has_told_prompt = True
        request, prompt = self._generation.request, self._generation.prompts[0]
        return (
            prompt.token_ids_json if request.return_token_ids else UNSET,
            UNSET if request.prompt_logprobs is None else prompt.logprobs_json,
        )

    def _token_ids(self, delta: Delta) -> list[int] | UnsetType:
        if not self._generation.request.return_token_ids:
            return UNSET
        return memoryview(delta.token_ids).cast("i").tolist()

    def _logprobs(self, delta: Delta) -> ChatLogprobs | None:
        alternatives = self._generation.request.logprobs
        if alternatives is None:
            return None
        return ChatLogprobs(
            [
                TokenLogprob(
                    self._name(token),
                    logprob,
                    self._bytes(token),
                    [TopLogprob(self._name(other), p, self._bytes(other)) for other, p in top],
                )
                for token, logprob, top in scored(delta, alternatives)
            ]
        )

    def _bytes(self, token: int) -> list[int] | None:
        return list(self._text.pieces(token.to_bytes(4, "little"))[0]) or None


def routes(chat: Chat, max_body_bytes: int) -> APIRouter:
    """The routes of this module."""
    router = APIRouter()

    @router.post("/v1/chat/completions")
    async def create_chat_completion(request: Request) -> Response:
        body = await read_body(request, max_body_bytes)
        return WhileConnected(lambda: chat.answer(body))

    return router
