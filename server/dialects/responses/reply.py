"""The wire shapes of responses: whole, and the events of their streams."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from srm.server.dialects.chat.reply import TokenLogprob
from srm.server.dialects.responses.items import (
    OutputCall,
    OutputItem,
    OutputMessage,
    OutputText,
    Status,
)
from srm.server.dialects.responses.request import FunctionChoice, FunctionTool, TextOptions
from srm.server.schema.openapi import reference


class InputDetails(msgspec.Struct, frozen=True):
    cached_tokens: int
    """Input tokens whose state was kept from an earlier request; they cost nothing."""
    cache_write_tokens: int = 0
    """Nothing is written for later requests on demand: states are kept anyway."""


class OutputDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int = 0
    """A model here thinks in its text, if at all."""


class ResponseUsage(msgspec.Struct, kw_only=True):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails = OutputDetails()
    total_tokens: int


class IncompleteDetails(msgspec.Struct):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseError(msgspec.Struct):
    code: Literal["server_error"]
    message: str
    type: str
    """That of an error which is a reply of its own."""


class Reasoning(msgspec.Struct, frozen=True):
    effort: str | None = None
    """As the request says it, for the template."""
    summary: None = None


_ITEMS = {"type": "array", "items": {"anyOf": [reference(OutputMessage), reference(OutputCall)]}}


class Response(msgspec.Struct, kw_only=True):
    """The reply. What the request said is said again, with defaults in place of what it did not."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    """Unix time in seconds."""
    status: Status | Literal["cancelled"]
    error: ResponseError | None = None
    """Why it failed, which the last event of a stream says, and what was made in the background."""
    incomplete_details: IncompleteDetails | None = None
    """Why it is incomplete."""
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: Annotated[Raw, Meta(extra_json_schema=_ITEMS)]
    """An OutputMessage, or the OutputCalls that the request asks for."""
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: Reasoning = Reasoning()
    store: bool
    """Whether it is there to be asked for, once it is whole."""
    temperature: float
    text: TextOptions
    tool_choice: str | FunctionChoice
    tools: list[FunctionTool]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    background: bool
    service_tier: Literal["default"] = "default"
    usage: ResponseUsage | None = None
    """Null until it has ended."""
    user: str | None
    safety_identifier: str | None
    prompt_cache_key: str | None
    metadata: dict[str, str]
    system_fingerprint: str | None = None
    """Fingerprint of the weights of `weights_version`."""
    weights_version: int | None = None
    """Version of the weights that made the last token: 1, and one more for each change."""
    first_weights_version: int | UnsetType = UNSET
    """Version of the weights that made the first token of a whole reply, if it is another one."""


class ResponseDeleted(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


EventType = Literal[
    "response.created",
    "response.in_progress",
    "response.completed",
    "response.incomplete",
    "response.failed",
]


class _Event(msgspec.Struct, kw_only=True):
    sequence_number: int = 0
    """Counts the events of a stream, from 0."""


class ResponseEvent(_Event):
    """The response as a whole: as it begins, and as it has ended."""

    type: EventType
    response: Response


class ItemEvent(_Event):
    """An item begins, or is whole."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    """Index of the item in `output`."""
    item: OutputItem


class PartEvent(_Event):
    """The text of a message begins, or is whole."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    item_id: str
    output_index: int
    content_index: int
    part: OutputText


TEXT_DELTA = "response.output_text.delta"
CALL_DELTA = "response.function_call_arguments.delta"


class TextDelta(_Event, tag_field="type", tag=TEXT_DELTA):
    """More of a text."""

    item_id: str
    output_index: int
    content_index: int
    delta: str
    logprobs: list[TokenLogprob]


class TextDone(_Event, tag_field="type", tag="response.output_text.done"):
    """The whole text."""

    item_id: str
    output_index: int
    content_index: int
    text: str
    logprobs: list[TokenLogprob]


class ArgumentsDelta(_Event, tag_field="type", tag=CALL_DELTA):
    """More of a call's arguments."""

    item_id: str
    output_index: int
    delta: str


class ArgumentsDone(_Event, tag_field="type", tag="response.function_call_arguments.done"):
    """The whole arguments."""

    item_id: str
    output_index: int
    name: str
    arguments: str


EVENTS = (ResponseEvent, ItemEvent, PartEvent, TextDelta, TextDone, ArgumentsDelta, ArgumentsDone)
