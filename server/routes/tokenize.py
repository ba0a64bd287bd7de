"""POST /tokenize and /detokenize, GET /tokenizer_info: the tokenizer for clients that have none.

Requests are bounded by MAX_CHARACTERS and MAX_TOKENS, since no context bounds them, and run in a
thread; long texts one after the other, since they take much memory. Knows no engine.
"""

from __future__ import annotations

import asyncio
from array import array
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Request
from msgspec import UNSET, Meta, UnsetType
from starlette.responses import Response

from engine.errors import InvalidRequest, NotFound
from server.http.bodies import json_reply, read_body
from server.http.responses import WhileConnected
from server.routes.chat import render
from server.routes.models import Models
from server.schema.chat_request import MESSAGES_FORMS
from server.schema.conversation import Conversation, Message, messages_of
from server.schema.openapi import BodySchema, Operation
from server.schema.sampling_fields import TokenId
from server.schema.validation import Fields, checked, given_fields, require
from server.text.chat_template import ChatTemplate
from server.text.text import AT_ONCE, Text

MAX_CHARACTERS = 1024 * 1024
"""Most characters of one request."""
MAX_TOKENS = 4 * 1024 * 1024
"""Most tokens of a request to make text of."""

Texts = Annotated[
    str | list[str], Meta(description="a string or a list of strings; or leave it out for messages")
]


class TokenizeRequest(Fields, frozen=True, kw_only=True):
    """Body of POST /tokenize, checked."""

    model: str | None = None
    prompt: Texts | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    """Default: for a prompt, and not for messages, whose template writes them."""
    return_token_strs: bool = False
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def conversation(self) -> Conversation | None:
        return None if self.messages is None else Conversation.of(self)

    def check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("send either prompt or messages", "prompt")
        if self.conversation is not None:
            self.conversation.check()
            return
        for name in ("add_generation_prompt", "continue_final_message", "chat_template_kwargs"):
            if getattr(self, name):
                raise InvalidRequest(f"{name} is allowed only with messages", name)


class DetokenizeRequest(Fields, frozen=True, kw_only=True):
    """Body of POST /detokenize, checked."""

    model: str | None = None
    tokens: Annotated[
        list[TokenId],
        Meta(max_length=MAX_TOKENS, description=f"a list of at most {MAX_TOKENS} token ids"),
    ]


class Tokenized(msgspec.Struct):
    """The tokens of a text; for a list of texts, all but the context are lists of these."""

    tokens: list[int | list[int]]
    count: int | list[int]
    max_model_len: int
    token_strs: list[str | list[str]] | UnsetType = UNSET


class Detokenized(msgspec.Struct):
    prompt: str


class TokenizerInfo(msgspec.Struct):
    """Special tokens are null where the model has none."""

    bos_token: str | None
    eos_token: str | None
    unk_token: str | None
    pad_token: str | None
    vocab_size: int
    model_max_length: int
    chat_template: str | None


OPERATIONS = tuple(
    msgspec.structs.replace(one, path=root + one.path)
    for one in (
        Operation("POST", "/tokenize", "The token ids of a text, of each of several, or of a chat.",
                  Tokenized, body=BodySchema(TokenizeRequest, {"messages": MESSAGES_FORMS}),
                  errors=(404,)),
        Operation("POST", "/detokenize", "The text of token ids.",
                  Detokenized, body=BodySchema(DetokenizeRequest), errors=(404,)),
        Operation("GET", "/tokenizer_info", "What the tokenizer is; 404 for a model without one.",
                  TokenizerInfo, errors=(404,)),
    )
    for root in ("", "/v1")
)  # fmt: skip


class Tokenizing:
    """The tokenizer of the model that is served."""

    def __init__(self, text: Text, models: Models, template: ChatTemplate | None) -> None:
        self._text = text
        self._models = models
        self._template = template
        self._long_texts = ThreadPoolExecutor(1, thread_name_prefix="long texts")

    async def tokenize(self, body: bytes) -> Tokenized:
        """Raises the RequestError to answer with."""
        request = _parse_tokenize(body)
        self._models.check(request.model)
        chat = request.conversation
        field = "prompt" if chat is None else "messages"
        if not self._text.has_tokenizer:
            raise InvalidRequest(f"{field} cannot be tokenized: this model has no tokenizer", field)
        prompt = request.prompt
        if chat is not None:
            prompt = await render(self._template, chat)
        assert prompt is not None
        texts = [prompt] if isinstance(prompt, str) else prompt
        characters = sum(map(len, texts))
        if characters > MAX_CHARACTERS:
            raise InvalidRequest(
                f"{field} has {characters} characters; at most {MAX_CHARACTERS} are tokenized",
                field,
            )
        adds_special = request.add_special_tokens
        encoded = await asyncio.get_running_loop().run_in_executor(
            self._long_texts if characters > AT_ONCE else None,
            self._text.encode,
            texts,
            chat is None if adds_special is None else adds_special,
        )
        tokens: list[Any] = [memoryview(ids).cast("i").tolist() for ids in encoded]
        counts = list(map(len, tokens))
        found = Tokenized(tokens, counts, self._text.model.n_ctx)
        if isinstance(prompt, str):
            found = Tokenized(tokens[0], counts[0], self._text.model.n_ctx)
        if request.return_token_strs:
            strings: list[Any] = [[self._text.labels[token] for token in ids] for ids in tokens]
            found.token_strs = strings[0] if isinstance(prompt, str) else strings
        return found

    async def detokenize(self, body: bytes) -> Detokenized:
        """Raises the RequestError to answer with."""
        given = given_fields(body)
        require(given, "tokens", "a list of token ids")
        request = checked(DetokenizeRequest, given, {}, {})
        self._models.check(request.model)
        size = self._text.model.vocab_size
        largest = max(request.tokens, default=0)
        if largest >= size:
            raise InvalidRequest(
                f"tokens has token id {largest}; ids go from 0 to {size - 1}", "tokens"
            )
        data = await asyncio.to_thread(self._text.spell, array("i", request.tokens).tobytes())
        return Detokenized(data.decode(errors="replace"))

    def info(self) -> TokenizerInfo:
        """Raises NotFound for a model without a tokenizer."""
        if not self._text.has_tokenizer:
            raise NotFound("this model has no tokenizer")
        known = self._text.special_tokens
        return TokenizerInfo(
            bos_token=known.get("bos_token"),
            eos_token=known.get("eos_token"),
            unk_token=known.get("unk_token"),
            pad_token=known.get("pad_token"),
            vocab_size=self._text.model.vocab_size,
            model_max_length=self._text.model.n_ctx,
            chat_template=self._template.source if self._template else None,
        )


def _parse_tokenize(body: bytes) -> TokenizeRequest:
    given = given_fields(body)
    converted: dict[str, Any] = {"messages": messages_of(given)} if "messages" in given else {}
    return checked(TokenizeRequest, given, converted, {})


def routes(tokenizing: Tokenizing, max_body_bytes: int) -> APIRouter:
    """The routes of this module, at the root and under /v1: servers differ, and so do clients."""
    router = APIRouter()

    @router.post("/tokenize")
    @router.post("/v1/tokenize")
    async def tokenize(request: Request) -> Response:
        body = await read_body(request, max_body_bytes)
        return WhileConnected(lambda: tokenizing.tokenize(body))

    @router.post("/detokenize")
    @router.post("/v1/detokenize")
    async def detokenize(request: Request) -> Response:
        body = await read_body(request, max_body_bytes)
        return WhileConnected(lambda: tokenizing.detokenize(body))

    @router.get("/tokenizer_info")
    @router.get("/v1/tokenizer_info")
    async def tokenizer_info() -> Response:
        return json_reply(tokenizing.info())

    return router
