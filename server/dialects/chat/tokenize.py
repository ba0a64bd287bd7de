"""POST /tokenize and /detokenize, GET /tokenizer_info: the tokenizer for clients that have none.

Requests are bounded by MAX_CHARACTERS and MAX_TOKENS, since no context bounds them, and run in a
thread; long texts one after the other, since they take much memory.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Annotated, Any, ClassVar

import msgspec
import numpy as np
from msgspec import UNSET, Meta, Raw, UnsetType

from srm.errors import InvalidRequest, NotFound
from srm.server.dialects.chat.endpoint import render
from srm.server.dialects.chat.request import (
    CHAT_FORMS,
    callable_tools,
    check_special_tokens,
    prefix_of,
)
from srm.server.dialects.completions.models import Models
from srm.server.generation.prompts import join_ids, rest_of
from srm.server.http.bodies import parsed
from srm.server.http.responses import add_operations
from srm.server.schema.conversation import (
    Conversation,
    ExactPrompt,
    Message,
    ReasoningEffort,
    messages_of,
)
from srm.server.schema.json_parts import TokenId, first_byte, texts, token_ids
from srm.server.schema.openapi import BodySchema, Operation, Router
from srm.server.schema.sampling_fields import NEUTRAL
from srm.server.schema.tools import ToolChoice, Tools
from srm.server.schema.validation import (
    Fields,
    allowed,
    checked,
    given_fields,
    reading,
    require,
)
from srm.server.text.chat_template import ChatTemplate
from srm.server.text.text import AT_ONCE, Text

MAX_CHARACTERS = 1024 * 1024
"""Most characters of one request."""
MAX_TEXTS = 65_536
"""Most texts of one request."""
MAX_TOKENS = 4 * 1024 * 1024
"""Most tokens of a request to make text of."""

Texts = Annotated[
    str | list[str],
    Meta(
        description=f"a string or a list of at most {MAX_TEXTS} strings; or leave it out for "
        "messages"
    ),
]


class ReadRequest(Fields, frozen=True, kw_only=True):
    """A body with something to read: `prompt`, which each has in its own form, or a chat."""

    model: str | None = None
    """Name of the served model; any other name is refused."""
    prompt: Any = None
    messages: list[Message] | None = None
    """A chat, in place of prompt."""
    add_special_tokens: bool | None = None
    """Add what the tokenizer prepends."""
    add_generation_prompt: bool | None = None
    """End the prompt with what the template writes before an answer."""
    continue_final_message: bool = False
    """Leave the last message open in the prompt."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the template."""
    tools: Tools = []  # noqa: RUF012 - msgspec copies it
    """Functions that the model may call, as in a chat."""
    tool_choice: ToolChoice | None = None
    """Which of them it calls, as in a chat."""
    reasoning_effort: ReasoningEffort | None = None
    """A variable of the template, which may read it."""
    required_prefix_token_ids: bytes | None = None
    """The tokens up to the end of the assistant's last message, in place of its text."""

    @property
    def conversation(self) -> Conversation | None:
        return None if self.messages is None else Conversation.from_request(self)

    @property
    def adds_special_tokens(self) -> bool:
        """Whether they are added: templates write them themselves."""
        return self.messages is None if self.add_special_tokens is None else self.add_special_tokens

    def check(self) -> None:
        if self.prompt is not None and self.messages is not None:
            raise InvalidRequest("send either prompt or messages", "prompt")
        if self.conversation is not None:
            self.conversation.check()
            check_special_tokens(self.conversation, self.add_special_tokens)
            return
        for name in (
            *("add_generation_prompt", "continue_final_message", "chat_template_kwargs"),
            *("required_prefix_token_ids", "tools"),
        ):
            if getattr(self, name):
                raise InvalidRequest(f"{name} is allowed only with messages", name)


class TokenizeRequest(ReadRequest, frozen=True, kw_only=True):
    """Body of POST /tokenize, checked."""

    successors: ClassVar = {"text": "its name is prompt"}
    prompt: Texts | None = None
    """The texts, at most 1048576 characters in all."""
    return_token_strs: bool = False
    """Add token_strs to the reply."""

    def check(self) -> None:
        if self.prompt is None and self.messages is None:
            raise InvalidRequest("send either prompt or messages", "prompt")
        super().check()


class DetokenizeRequest(Fields, frozen=True, kw_only=True):
    """Body of POST /detokenize, checked."""

    model: str | None = None
    """Name of the served model; any other name is refused."""
    tokens: bytes
    """The tokens to write as text."""


TOKENS_FORMS = (
    Annotated[
        list[TokenId],
        Meta(max_length=MAX_TOKENS, description=f"a list of at most {MAX_TOKENS} token ids"),
    ],
)
"""Types that `tokens` may have on the wire."""


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
    msgspec.structs.replace(operation, path=root + operation.path)
    for operation in (
        Operation("POST", "/tokenize", "The token ids of a text, of each of several, or of a chat.",
                  Tokenized, body=BodySchema(TokenizeRequest, CHAT_FORMS, NEUTRAL),
                  errors=(404,)),
        Operation("POST", "/detokenize", "The text of token ids.",
                  Detokenized,
                  body=BodySchema(DetokenizeRequest, {"tokens": TOKENS_FORMS}, NEUTRAL),
                  errors=(404,)),
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
        request = await parsed(parse_tokenize, body)
        self._models.check(request.model)
        chat = request.conversation
        field = "prompt" if chat is None else "messages"
        if not self._text.has_tokenizer:
            raise InvalidRequest(f"{field} cannot be tokenized: this model has no tokenizer", field)
        prompt: str | list[str] | ExactPrompt | None = request.prompt
        given: ExactPrompt | None = None
        if chat is not None:
            prompt = await render(self._template, chat)
            if isinstance(prompt, ExactPrompt):
                given, prompt = prompt, rest_of(prompt, self._text)
        assert isinstance(prompt, str | list)
        characters = len(prompt) if isinstance(prompt, str) else sum(map(len, prompt))
        if characters > MAX_CHARACTERS:
            raise InvalidRequest(
                f"{field} has {characters} characters; at most {MAX_CHARACTERS} are tokenized",
                field,
            )
        return await asyncio.get_running_loop().run_in_executor(
            self._long_texts if characters > AT_ONCE else None,
            partial(self._tokenized, prompt, request, given),
        )

    def _tokenized(
        self, prompt: str | list[str], request: TokenizeRequest, given: ExactPrompt | None
    ) -> Tokenized:
        prompts = [prompt] if isinstance(prompt, str) else prompt
        encoded = self._text.encode(prompts, request.adds_special_tokens)
        if given is not None:
            encoded = [join_ids(given, encoded[0], self._text)]
        tokens: list[Any] = [memoryview(ids).cast("i").tolist() for ids in encoded]
        counts = list(map(len, tokens))
        tokenized = Tokenized(tokens, counts, self._text.model.n_ctx)
        if isinstance(prompt, str):
            tokenized = Tokenized(tokens[0], counts[0], self._text.model.n_ctx)
        if request.return_token_strs:
            strings: list[Any] = [[self._text.labels[token] for token in ids] for ids in tokens]
            tokenized.token_strs = strings[0] if isinstance(prompt, str) else strings
        return tokenized

    async def detokenize(self, body: bytes) -> Detokenized:
        """Raises the RequestError to answer with."""
        request = await parsed(parse_detokenize, body)
        self._models.check(request.model)
        size = self._text.model.vocab_size
        largest = int(np.frombuffer(request.tokens, "<i4").max(initial=0))
        if largest >= size:
            raise InvalidRequest(
                f"tokens has token id {largest}; ids go from 0 to {size - 1}", "tokens"
            )
        data = await asyncio.to_thread(self._text.spell, request.tokens)
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


def parse_tokenize(body: bytes) -> TokenizeRequest:
    given = given_fields(body, TokenizeRequest, NEUTRAL)
    converted = chat_fields(given)
    if "prompt" in given:
        converted["prompt"] = _prompt(given["prompt"])
    return checked(TokenizeRequest, given, converted, NEUTRAL)


def chat_fields(given: dict[str, Raw]) -> dict[str, Any]:
    """Return the fields of a ReadRequest that are read before the others. Raises InvalidRequest."""
    messages = {"messages": messages_of(given)} if "messages" in given else {}
    return {**messages, **prefix_of(given), **callable_tools(given)}


def _prompt(value: Raw) -> str | list[str]:
    prompt: str | list[str]
    with reading("prompt", value, f"be {allowed(Texts)}"):
        is_list = first_byte(value) == b"["
        prompt = texts(value, MAX_TEXTS) if is_list else msgspec.json.decode(value, type=str)
    return prompt


def parse_detokenize(body: bytes) -> DetokenizeRequest:
    given = given_fields(body, DetokenizeRequest, NEUTRAL)
    require(given, "tokens", "a list of token ids")
    value = given["tokens"]
    with reading("tokens", value, f"be {allowed(TOKENS_FORMS[0])}"):
        if len(ids := token_ids(value)) > 4 * MAX_TOKENS:
            raise msgspec.ValidationError
    return checked(DetokenizeRequest, given, {"tokens": ids}, NEUTRAL)


def add_routes(router: Router, tokenizing: Tokenizing, max_body_bytes: int) -> None:
    """Add the routes of this module, at the root and under /v1: clients differ."""
    each = (tokenizing.tokenize, tokenizing.detokenize, tokenizing.info)
    actions = [action for action in each for _ in range(2)]
    add_operations(router, OPERATIONS, actions, max_body_bytes)
