"""The reply to POST /v1/messages: blocks of content, whole or in named events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from msgspec import UNSET, Raw

from srm.server.dialects.messages.reply import (
    BlockDelta,
    BlockInput,
    BlockStart,
    BlockStop,
    BlockText,
    Ending,
    MessageDelta,
    MessageReply,
    MessageStart,
    MessageStop,
    MessageUsage,
    StopReason,
    StreamError,
    StreamFault,
    TextBlock,
    ToolUseBlock,
)
from srm.server.dialects.responses.format import Item, ItemFormat, type_of
from srm.server.errors import ErrorBody
from srm.server.generation.detokenize import ChoicePart
from srm.server.reply.call_reader import is_whole
from srm.server.reply.format import encode_json
from srm.server.schema.completion_response import Usage

_OBJECT = Raw(b"{}")


class _Block(Item):
    begin = b"event: content_block_delta\ndata: "

    def last_events(self) -> list[Any]:
        return [BlockStop("content_block_stop", self.place)]


class _Text(_Block):
    def shown(self) -> TextBlock:
        return TextBlock(text=self.text)

    def first_events(self) -> list[Any]:
        return [BlockStart("content_block_start", self.place, TextBlock(text=""))]

    def delta(self, text: str, _scores: Any, place: int) -> Any:
        return BlockDelta("content_block_delta", place, BlockText(text))


class _ToolUse(_Block):
    @property
    def is_whole(self) -> bool:
        return is_whole(self.decoded)

    def shown(self) -> ToolUseBlock:
        return self._block(Raw(self.decoded.encode()))

    def _block(self, arguments: Raw) -> ToolUseBlock:
        return ToolUseBlock(id=f"toolu_{self.number}_{self.place}", name=self.name, input=arguments)

    def first_events(self) -> list[Any]:
        return [BlockStart("content_block_start", self.place, self._block(_OBJECT))]

    def delta(self, text: str, _scores: Any, place: int) -> Any:
        return BlockDelta("content_block_delta", place, BlockInput(text))


class MessageFormat(ItemFormat):
    """A MessageReply, or its events."""

    message_kind, call_kind = _Text, _ToolUse
    engine_fields: ClassVar[dict[str, str]] = {"prompt_token_ids": "messages"}

    def opening(self, parts: list[ChoicePart]) -> list[Any]:
        if not parts[0].is_first:
            return []
        usage = _usage(self.generation.usage_of(0))
        message = MessageReply(
            id=self.generation.id, model=self.model_name, content=[], usage=usage
        )
        return [MessageStart("message_start", message), *self.begin_output()]

    def envelope(self, fields: dict[str, Any], is_event: bool) -> Any:
        """An event is whole as it is; behind the last one there is the end of the message."""
        if is_event and fields["choices"]:
            return fields["choices"][0]
        usage, reason = _usage(fields["usage"]), self._stop_reason
        stop = None if self.stop_string is None else str(self.stop_string)
        if is_event:
            return MessageDelta("message_delta", Ending(reason, stop), usage)
        return MessageReply(
            id=self.generation.id,
            model=self.model_name,
            content=[item.shown() for item in self.items if self.is_text or item.is_whole],
            stop_reason=reason,
            stop_sequence=stop,
            usage=usage,
            system_fingerprint=fields["system_fingerprint"],
            weights_version=fields["weights_version"],
        )

    def frame(self, documents: Sequence[bytes]) -> bytes:
        if documents and type_of(documents[-1]) == "message_delta":
            documents = [*documents, encode_json(MessageStop())]
        return super().frame(documents)

    def frame_error(self, body: ErrorBody) -> bytes:
        fault = StreamFault(body.error.type, body.error.message)
        return self.frame([encode_json(StreamError("error", fault))])

    @property
    def _stop_reason(self) -> StopReason:
        if self.is_full:
            return "max_tokens"
        if self.stop_string is not None:
            return "stop_sequence"
        return "end_turn" if self.is_text else "tool_use"


def _usage(usage: Usage) -> MessageUsage:
    details = usage.prompt_tokens_details
    cached = 0 if details is UNSET else details.cached_tokens
    return MessageUsage(
        input_tokens=usage.prompt_tokens - cached,
        cache_read_input_tokens=cached,
        output_tokens=usage.completion_tokens,
    )
