"""The reply to POST /v1/responses: items of output, whole or in named and numbered events."""

from __future__ import annotations

from typing import Any, ClassVar

from msgspec import UNSET, Raw

from srm.server.dialects.responses.items import (
    OutputCall,
    OutputItem,
    OutputMessage,
    OutputText,
    Status,
)
from srm.server.dialects.responses.reply import (
    CALL_DELTA,
    TEXT_DELTA,
    ArgumentsDelta,
    ArgumentsDone,
    EventType,
    IncompleteDetails,
    InputDetails,
    ItemEvent,
    PartEvent,
    Reasoning,
    Response,
    ResponseError,
    ResponseEvent,
    ResponseUsage,
    TextDelta,
    TextDone,
)
from srm.server.dialects.responses.request import ResponseRequest, TextOptions
from srm.server.errors import ErrorBody
from srm.server.generation.detokenize import ChoicePart
from srm.server.generation.generation import Generation
from srm.server.reply.format import encode_json
from srm.server.reply.items import Item, ItemFormat
from srm.server.reply.scores import ChatScores
from srm.server.schema.completion_response import Usage
from srm.server.schema.tools import Calls


class ResponseScores(ChatScores):
    """Writes a list of `TokenLogprob`s."""

    _around, _no_bytes = b"[%b]", b"[]"


class ResponsesFormat(ItemFormat):
    """A Response, or its events."""

    scores_kind = ResponseScores
    text_delta, call_delta = TEXT_DELTA, CALL_DELTA
    has_numbers = True
    engine_fields: ClassVar[dict[str, str]] = {
        "prompt_token_ids": "input",
        "max_tokens": "max_output_tokens",
        "logprobs": "top_logprobs",
    }

    def __init__(
        self, generation: Generation, asked: ResponseRequest, calls: Calls | None = None
    ) -> None:
        super().__init__(generation, calls)
        self.asked = asked
        self._num_events = 0
        self.wants_tokens = bool(asked.store)  # so that no event is made without its parts
        self.sampled = bytearray()
        """All that was sampled, int32 little-endian, if it is to be stored."""

    @property
    def message(self) -> dict[str, Any]:
        """Return the reply as the message of a chat. A tool call that was cut is text."""
        calls = [item for item in self.items if item.name is not None]
        text = "".join(item.decoded for item in self.items if item.name is None)
        if any(item.status != "completed" for item in calls):
            decoded = self.generation.text.decode(bytes(self.sampled))
            text, calls = decoded.decode(errors="replace"), []
        message: dict[str, Any] = {"role": "assistant", "content": text}
        for item in calls:
            function = {"name": item.name, "arguments": item.decoded}
            call = {"id": self._call_id_of(item), "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(call)
        return message

    def events(self, parts: list[ChoicePart]) -> list[list[Any]]:
        if self.wants_tokens:
            self.sampled += b"".join(part.token_ids for part in parts)
        return super().events(parts)

    def shown(self, item: Item) -> OutputItem:
        id, status = self._id_of(item), item.status
        if item.name is None:
            content = [] if status == "in_progress" else [_part(item)]
            return OutputMessage(id=id, status=status, content=content)
        call_id = self._call_id_of(item)
        return OutputCall(
            id=id, call_id=call_id, name=item.name, arguments=item.text, status=status
        )

    def _call_id_of(self, item: Item) -> str:
        return f"call_{self.number}_{item.place}"

    def _id_of(self, item: Item) -> str:
        is_text = item.name is None
        return f"msg_{self.number}" if is_text else f"fc_{self.number}_{item.place}"

    def greeting(self) -> list[Any]:
        kinds: tuple[EventType, ...] = ("response.created", "response.in_progress")
        return [ResponseEvent(kind, self._response("in_progress")) for kind in kinds]

    def first_events(self, item: Item) -> list[Any]:
        added = ItemEvent("response.output_item.added", item.place, self.shown(item))
        if item.name is not None:
            return [added]
        at = self._id_of(item), item.place, 0
        return [added, PartEvent("response.content_part.added", *at, _part(item))]

    def delta(self, item: Item, text: str, scores: Any, place: int) -> Any:
        id = self._id_of(item)
        if item.name is None:
            return TextDelta(id, place, 0, text, scores)
        return ArgumentsDelta(id, place, text)

    def last_events(self, item: Item) -> list[Any]:
        at, name = (self._id_of(item), item.place), item.name
        done = ItemEvent("response.output_item.done", item.place, self.shown(item))
        if name is not None:
            return [ArgumentsDone(*at, name, item.text), done]
        return [
            TextDone(*at, 0, item.text, item.scores),
            PartEvent("response.content_part.done", *at, 0, _part(item)),
            done,
        ]

    def ending(self, fields: dict[str, Any], is_event: bool) -> Any:
        response = self._response(
            "incomplete" if self.is_cut else "completed",
            usage=_usage(fields["usage"]),
            incomplete_details=IncompleteDetails() if self.is_full else None,
            system_fingerprint=fields["system_fingerprint"],
            weights_version=fields["weights_version"],
            first_weights_version=fields.get("first_weights_version", UNSET),
        )
        if not is_event:
            return response
        kind: EventType = "response.incomplete" if self.is_cut else "response.completed"
        return self.numbered(ResponseEvent(kind, response))

    def frame_error(self, body: ErrorBody) -> bytes:
        error = ResponseError("server_error", body.error.message, body.error.type)
        if self.items and self.items[-1].status == "in_progress":
            self.items[-1].end(is_cut=True)
        failed = ResponseEvent("response.failed", self._response("failed", error=error))
        return self.frame([encode_json(self.numbered(failed))])

    def numbers(self, text: bytes, scores: bytes) -> tuple[int, ...]:
        self.items[-1].add(text, scores)
        self._num_events += 1
        return (self._num_events - 1,)

    def numbered(self, event: Any) -> Any:
        event.sequence_number = self._num_events
        self._num_events += 1
        return event

    def _response(self, status: Status, **fields: Any) -> Response:
        """Return the response so far."""
        asked = self.asked
        effort = None if asked.reasoning is None else asked.reasoning.effort
        same: dict[str, Any] = {
            name: getattr(asked, name)
            for name in {*Response.__struct_fields__} & {*asked.__struct_fields__}
        }
        return Response(
            id=self.generation.id,
            created_at=self.generation.created_unix,
            status=status,
            output=Raw(encode_json([*map(self.shown, self.items)])),
            **same
            | {
                "model": self.generation.model_name,
                "parallel_tool_calls": bool(asked.parallel_tool_calls),
                "reasoning": Reasoning(effort),
                "store": bool(asked.store) and status != "failed",
                "text": asked.text or TextOptions(),
                "top_logprobs": asked.top_logprobs or 0,
            },
            **fields,
        )


def _part(item: Item) -> OutputText:
    return OutputText(text=item.text, logprobs=item.scores)


def _usage(usage: Usage) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputDetails(usage.cached_tokens),
        output_tokens=usage.completion_tokens,
        total_tokens=usage.total_tokens,
    )
