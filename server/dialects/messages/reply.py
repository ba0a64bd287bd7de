"""The wire shapes of messages: whole, and the events of their streams."""

from __future__ import annotations

from typing import Literal

import msgspec

from srm.server.dialects.messages.request import JsonObject


class TextBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    text: str


class ToolUseBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_use"):
    """A call of a tool, which the client makes."""

    id: str
    """What the tool returns names it."""
    name: str
    input: JsonObject


Block = TextBlock | ToolUseBlock
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessageUsage(msgspec.Struct, kw_only=True):
    input_tokens: int
    """Those whose state was not kept from an earlier request."""
    cache_read_input_tokens: int
    """The others; they cost nothing."""
    cache_creation_input_tokens: int = 0
    """Nothing is written on demand: states are kept anyway."""
    output_tokens: int


class MessageReply(msgspec.Struct, kw_only=True):
    """The reply."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Block]
    """A text, or the calls. One that is cut off is left out."""
    stop_reason: StopReason | None = None
    """Why it ended; null in the first event of a stream."""
    stop_sequence: str | None = None
    """The stop string that ended it."""
    usage: MessageUsage
    system_fingerprint: str | None = None
    """Fingerprint of the weights of `weights_version`."""
    weights_version: int | None = None
    """Version of the weights that made the last token: 1, and one more for each change."""


class MessageStart(msgspec.Struct):
    type: Literal["message_start"]
    message: MessageReply


class BlockStart(msgspec.Struct):
    type: Literal["content_block_start"]
    index: int
    content_block: Block


class BlockText(msgspec.Struct, tag_field="type", tag="text_delta"):
    text: str


class BlockInput(msgspec.Struct, tag_field="type", tag="input_json_delta"):
    partial_json: str


class BlockDelta(msgspec.Struct):
    type: Literal["content_block_delta"]
    index: int
    delta: BlockText | BlockInput


class BlockStop(msgspec.Struct):
    type: Literal["content_block_stop"]
    index: int


class Ending(msgspec.Struct):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(msgspec.Struct):
    type: Literal["message_delta"]
    delta: Ending
    usage: MessageUsage


class MessageStop(msgspec.Struct):
    type: Literal["message_stop"] = "message_stop"


class StreamFault(msgspec.Struct):
    type: str
    """That of an error which is a reply of its own."""
    message: str


class StreamError(msgspec.Struct):
    type: Literal["error"]
    error: StreamFault


EVENTS = (
    *(MessageStart, BlockStart, BlockDelta, BlockStop, MessageDelta, MessageStop),
    StreamError,
)


class TokenCount(msgspec.Struct):
    input_tokens: int
