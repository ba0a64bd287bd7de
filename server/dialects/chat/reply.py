"""The wire shapes of chat replies, whole or as chunks of a stream."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType, field

from srm.engine.receipt import Receipt
from srm.server.schema.completion_response import (
    NULL,
    PromptLogprobsJson,
    Samples,
    TokenIdsJson,
    Usage,
    VersionSpan,
)
from srm.server.schema.openapi import reference


class TopLogprob(msgspec.Struct):
    """A token in another one's place."""

    token: str
    logprob: float
    bytes: list[int] | None
    """UTF-8 bytes of its text; null for a special token, which has none."""


class TokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]
    """The likeliest tokens in its place, the likeliest first."""


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprob]
    refusal: None = None
    """A model here has no other voice to refuse with."""


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str
    """JSON; cut off if the choice ended by its length."""


class ToolCall(msgspec.Struct):
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class ChatMessage(msgspec.Struct, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str | None
    """Null beside tool calls."""
    refusal: None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET
    """The calls that `tool_choice` asked for."""


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None
    stop_reason: str | int | None = None
    """The stop string or stop token that ended it, if one did."""
    token_ids: list[int] | None = None
    matched: bool | UnsetType = UNSET
    """Whether it is a match by `until`."""
    score: float | UnsetType = UNSET
    """Score by `verify`."""
    count: int | UnsetType = UNSET
    """Number of samples that this choice stands for; only with `return` = "unique"."""
    state: str | UnsetType | None = UNSET
    """Id of its state, with `save_state`; null where its tokens fill the context."""
    states: dict[str, str | None] | UnsetType = UNSET
    """Ids of its states by position, with `save_at`; null behind its end."""
    weight_versions: list[VersionSpan] | UnsetType = UNSET
    """Which weights made which of its tokens, with `return_weight_versions`."""
    receipt: Receipt | UnsetType = UNSET
    """The record that `srm replay` needs; only with `receipt`."""


class ChatCompletion(msgspec.Struct, kw_only=True):
    """The whole reply."""

    id: str
    object: str = "chat.completion"
    created: int
    """Unix time in seconds."""
    model: str
    choices: list[Annotated[Raw, Meta(extra_json_schema=reference(ChatChoice))]]
    """Each a ChatChoice, encoded when it was ready."""
    usage: Usage
    system_fingerprint: str | None = None
    weights_version: int | None = None
    """Version of the weights that made the last token: 1, and one more for each change."""
    first_weights_version: int | UnsetType = UNSET
    """Version of the weights that made the first token, if it is another one."""
    prompt_token_ids: TokenIdsJson = field(default_factory=lambda: NULL)
    prompt_logprobs: PromptLogprobsJson = field(default_factory=lambda: NULL)
    samples: list[Samples] | UnsetType = UNSET
    """Counts of the samples drawn; only with `until`, `verify`, or another `return` than
    "choices"."""


class FunctionDelta(msgspec.Struct, omit_defaults=True):
    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(msgspec.Struct, omit_defaults=True):
    """The new part of a call; its first has id, type and name, and no arguments."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    """Of the call, in its first chunk only."""
    type: Literal["function"] | UnsetType = UNSET


class ChatDelta(msgspec.Struct, omit_defaults=True):
    """The new part of a message."""

    role: Literal["assistant"] | UnsetType = UNSET
    """Role of the message, in the first chunk of a choice only."""
    content: str | UnsetType | None = UNSET
    """Null in the first chunk of a message of calls."""
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChunkChoice(msgspec.Struct, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET
    matched: bool | UnsetType = UNSET
    score: float | UnsetType = UNSET
    weight_versions: list[VersionSpan] | UnsetType = UNSET
    """Of the tokens that come with this chunk."""


class ChatChunk(msgspec.Struct, kw_only=True):
    """An event of a stream."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[Annotated[Raw, Meta(extra_json_schema=reference(ChunkChoice))]]
    """Each a ChunkChoice."""
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str | None = None
    weights_version: int | None = None
    """Version of the weights that made the last token of this chunk."""
    prompt_token_ids: TokenIdsJson | UnsetType = UNSET
    prompt_logprobs: PromptLogprobsJson | UnsetType = UNSET
    """Log-probabilities of the prompt's tokens, in the first chunk only."""
    samples: list[Samples] | UnsetType = UNSET
    """Counts of the samples drawn, in the last chunk only and only with `until` or `verify`."""
