"""The reply to POST /v1/messages: blocks of content, whole or in named events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from msgspec import Raw

from srm.server.dialects.messages.reply import (
    Block,
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
from srm.server.errors import ErrorBody
from srm.server.reply.format import encode_json
from srm.server.reply.items import Item, ItemFormat, type_of
from srm.server.reply.scores import ChatScores
from srm.server.schema.completion_response import Usage


class MessageFormat(ItemFormat):
    """A MessageReply, or its events."""

    scores_kind = ChatScores
    text_delta = call_delta = "content_block_delta"
    engine_fields: ClassVar[dict[str, str]] = {"prompt_token_ids": "messages"}

    def shown(self, item: Item) -> Block:
        if item.name is None:
            return TextBlock(text=item.text)
        return self._call(item, item.name, item.decoded)

    def _call(self, item: Item, name: str, arguments: str) -> ToolUseBlock:
        id = f"toolu_{self.number}_{item.place}"
        return ToolUseBlock(id=id, name=name, input=Raw(arguments.encode()))

    def greeting(self) -> list[Any]:
        id, usage = self.generation.id, _usage(self.generation.usage_of(0))
        message = MessageReply(id=id, model=self.generation.model_name, content=[], usage=usage)
        return [MessageStart("message_start", message)]

    def first_events(self, item: Item) -> list[Any]:
        name = item.name
        block = TextBlock(text="") if name is None else self._call(item, name, "{}")
        return [BlockStart("content_block_start", item.place, block)]

    def delta(self, item: Item, text: str, _scores: Any, place: int) -> Any:
        more = BlockText(text) if item.name is None else BlockInput(text)
        return BlockDelta("content_block_delta", place, more)

    def last_events(self, item: Item) -> list[Any]:
        return [BlockStop("content_block_stop", item.place)]

    def ending(self, fields: dict[str, Any], is_event: bool) -> Any:
        usage, reason = _usage(fields["usage"]), self._stop_reason
        stop = None if self.stop_string is None else str(self.stop_string)
        if is_event:
            return MessageDelta("message_delta", Ending(reason, stop), usage)
        return MessageReply(
            id=self.generation.id,
            model=self.generation.model_name,
            content=[self.shown(item) for item in self.items if self.is_text or item.is_whole],
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
        if self.is_full or self.is_aborted:
            return "max_tokens"
        if self.stop_string is not None:
            return "stop_sequence"
        return "end_turn" if self.is_text else "tool_use"


def _usage(usage: Usage) -> MessageUsage:
    return MessageUsage(
        input_tokens=usage.prompt_tokens - usage.cached_tokens,
        cache_read_input_tokens=usage.cached_tokens,
        output_tokens=usage.completion_tokens,
    )
