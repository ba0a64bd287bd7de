"""The reply to POST /v1/responses: items of output, whole or in named and numbered events.

A stream says everything several times: piece by piece, then each text, part, item and at last the
whole response. So what was sent is kept, as the JSON that it was sent as.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec
from msgspec import UNSET, Raw

from srm.server.errors import ErrorBody
from srm.server.generation.detokenize import ChoicePart
from srm.server.generation.generation import Generation
from srm.server.reply.call_reader import CallReader
from srm.server.reply.format import Format
from srm.server.reply.scores import ChatScores
from srm.server.reply.template import NUMBER, TEXT, encode_json, escape
from srm.server.schema.completion_response import Usage
from srm.server.schema.json_parts import escape_line_ends
from srm.server.schema.responses.items import (
    OutputCall,
    OutputItem,
    OutputMessage,
    OutputText,
    Status,
)
from srm.server.schema.responses.reply import (
    ArgumentsDelta,
    ArgumentsDone,
    EventType,
    IncompleteDetails,
    InputDetails,
    ItemEvent,
    PartEvent,
    Response,
    ResponseError,
    ResponseEvent,
    ResponseUsage,
    TextDelta,
    TextDone,
)
from srm.server.schema.responses.request import ResponseRequest, TextOptions
from srm.server.schema.tools import Calls
from srm.server.text.text import Text


class ResponseScores(ChatScores):
    """Writes a list of `TokenLogprob`s."""

    _around, _no_bytes = b"[%b]", b"[]"


class _Event(msgspec.Struct):
    """What every event has."""

    type: str


_decode_event = msgspec.json.Decoder(_Event).decode


class _Item(ABC):
    """An item of output that grows."""

    begin: ClassVar[bytes]
    """What stands before the JSON of an event with more of its text."""

    def __init__(self, place: int, id: str) -> None:
        self.place = place
        self.id = id
        self.status: Status = "in_progress"
        self._texts: list[bytes] = []
        self._scores: list[bytes] = []

    def add(self, text: bytes, scores: bytes) -> None:
        """Note more of its text, as JSON without quotation marks, and a list of its scores."""
        self._texts.append(text)
        if len(scores) > len(b"[]"):
            self._scores.append(scores[1:-1])

    @property
    def text(self) -> Any:
        """Its text so far, as JSON that stands where the structs have a string."""
        return Raw(b'"%b"' % b"".join(self._texts))

    @abstractmethod
    def shown(self) -> OutputItem:
        """Return the item so far; without its content while that grows."""

    @abstractmethod
    def first_events(self) -> list[Any]:
        """Return the events between its first and its text. All lack their numbers."""

    @abstractmethod
    def delta(self, text: str, scores: Any, place: int) -> Any:
        """Return the event with more text."""

    @abstractmethod
    def last_events(self) -> list[Any]:
        """Return the events between its text and its last."""


class _Message(_Item):
    begin = b"event: response.output_text.delta\ndata: "

    def shown(self) -> OutputItem:
        content = [] if self.status == "in_progress" else [self._part]
        return OutputMessage(id=self.id, status=self.status, content=content)

    @property
    def _part(self) -> OutputText:
        scores: Any = Raw(b"[%b]" % b",".join(self._scores))
        return OutputText(text=self.text, logprobs=scores)

    def first_events(self) -> list[Any]:
        return [PartEvent("response.content_part.added", self.id, self.place, 0, self._part)]

    def delta(self, text: str, scores: Any, place: int) -> Any:
        return TextDelta("response.output_text.delta", self.id, place, 0, text, scores)

    def last_events(self) -> list[Any]:
        part, at = self._part, (self.id, self.place, 0)
        return [
            TextDone("response.output_text.done", *at, part.text, part.logprobs),
            PartEvent("response.content_part.done", *at, part),
        ]


class _Call(_Item):
    begin = b"event: response.function_call_arguments.delta\ndata: "

    def __init__(self, place: int, id: str, name: str) -> None:
        super().__init__(place, f"fc_{id}_{place}")
        self._call_id = f"call_{id}_{place}"
        self._name = name

    def shown(self) -> OutputItem:
        return OutputCall(
            id=self.id,
            call_id=self._call_id,
            name=self._name,
            arguments=self.text,
            status=self.status,
        )

    def first_events(self) -> list[Any]:
        return []

    def delta(self, text: str, _scores: Any, place: int) -> Any:
        return ArgumentsDelta("response.function_call_arguments.delta", self.id, place, text)

    def last_events(self) -> list[Any]:
        at = self.id, self.place
        return [ArgumentsDone("response.function_call_arguments.done", *at, self._name, self.text)]


class ResponsesFormat(Format):
    """A Response, or its events."""

    scores_kind = ResponseScores
    has_numbers = True
    last_event = b""

    def __init__(
        self,
        generation: Generation,
        text: Text,
        model_name: str,
        asked: ResponseRequest,
        calls: Calls | None = None,
    ) -> None:
        super().__init__(generation, text, model_name)
        self.begin = _Message.begin if calls is None else _Call.begin
        self._asked = asked
        self._calls = calls
        self._reader = CallReader()
        self._is_text = None if calls is not None and calls.may_be_text else calls is None
        """None: not known before there is some."""
        self._id = generation.id.removeprefix("resp_")
        self._items: list[_Item] = []
        self._num_events = 0
        self._is_cut = False  # by the limit of tokens

    def make_choice(self, part: ChoicePart, is_event: bool) -> Any:  # noqa: ARG002
        """Return the items of output."""
        self._begin_output()
        self.events([part])
        return [item.shown() for item in self._items]

    def opening(self, parts: list[ChoicePart]) -> list[Any]:
        if not parts[0].is_first:
            return []
        kinds: tuple[EventType, ...] = ("response.created", "response.in_progress")
        events = [ResponseEvent(kind, self._response("in_progress")) for kind in kinds]
        return [*map(self._numbered, events), *self._begin_output()]

    def events(self, parts: list[ChoicePart]) -> list[list[Any]]:
        events = []
        for part in parts:
            events += self._text_events(part)
            if part.finish_reason is not None:
                if self._is_text is None:  # it is empty
                    events += self._begin_message()
                self._is_cut = part.finish_reason == "length"
                events += self._end_item()
        return [events] if events else []

    def envelope(self, fields: dict[str, Any], is_event: bool) -> Any:
        """An event is whole as it is; behind the last one there is the response."""
        if is_event and fields["choices"]:
            return fields["choices"][0]
        response = self._response(
            "incomplete" if self._is_cut else "completed",
            usage=_usage(fields["usage"]),
            incomplete_details=IncompleteDetails() if self._is_cut else None,
            system_fingerprint=fields["system_fingerprint"],
            weights_version=fields["weights_version"],
            first_weights_version=fields.get("first_weights_version", UNSET),
        )
        if not is_event:
            return response
        kind: EventType = "response.incomplete" if self._is_cut else "response.completed"
        return self._numbered(ResponseEvent(kind, response))

    def frame(self, documents: Sequence[bytes]) -> bytes:
        names = [_decode_event(document).type.encode() for document in documents]
        events = zip(names, map(escape_line_ends, documents), strict=True)
        return b"".join(b"event: %b\ndata: %b\n\n" % event for event in events)

    def frame_error(self, body: ErrorBody) -> bytes:
        error = ResponseError("server_error", body.error.message, body.error.type)
        if self._items and self._items[-1].status == "in_progress":
            self._items[-1].status = "incomplete"
        failed = ResponseEvent("response.failed", self._response("failed", error=error))
        return self.frame([encode_json(self._numbered(failed))])

    def numbers(self, text: bytes, scores: bytes) -> tuple[int, ...]:
        self._items[-1].add(text, scores)
        self._num_events += 1
        return (self._num_events - 1,)

    def _text_events(self, part: ChoicePart) -> list[Any]:
        """Return the events with what is new."""
        calls = self._calls
        if part.text is TEXT and calls is not None and not calls.is_one_function:
            raise ValueError("what a part says depends on the text before")
        events: list[Any] = []
        if self._is_text is None and calls is not None and part.text:
            self._is_text = calls.is_text(part.text)
            events = self._begin_message() if self._is_text else []
        if self._is_text or (calls is not None and calls.is_one_function):
            wants_scores = self._is_text and self.request.logprobs is not None
            if part.text or (wants_scores and part.num_tokens):
                events.append(self._delta(part.text, self.logprobs(part), part.index))
            return events
        for piece in self._reader.read(part.text):
            if piece.name is None:
                events.append(self._delta(piece.arguments))
            else:
                events += [*self._end_item(), *self._begin_call(piece.name)]
        return events

    def _delta(self, text: str, scores: Any = None, index: int = 0) -> Any:
        item, scores = self._items[-1], [] if scores is None else scores
        if text is TEXT:  # an example, which is not sent
            event = item.delta(TEXT, scores, index)
            event.sequence_number = NUMBER
            return event
        item.add(escape(text), bytes(scores))
        return self._numbered(item.delta(text, scores, item.place))

    def _begin_output(self) -> list[Any]:
        """Begin the one item, if it is known to be the one."""
        if self._calls is None:
            return self._begin_message()
        if self._calls.is_one_function:
            return self._begin_call(self._calls.functions[0].name)
        return []

    def _begin_message(self) -> list[Any]:
        return self._begin_item(_Message(0, f"msg_{self._id}"))

    def _begin_call(self, name: str) -> list[Any]:
        return self._begin_item(_Call(len(self._items), self._id, name))

    def _begin_item(self, item: _Item) -> list[Any]:
        self._items.append(item)
        added = ItemEvent("response.output_item.added", item.place, item.shown())
        return [*map(self._numbered, [added, *item.first_events()])]

    def _end_item(self) -> list[Any]:
        """End the last item, if one goes on."""
        if not self._items or self._items[-1].status != "in_progress":
            return []
        item = self._items[-1]
        item.status = "incomplete" if self._is_cut else "completed"
        done = ItemEvent("response.output_item.done", item.place, item.shown())
        return [*map(self._numbered, [*item.last_events(), done])]

    def _numbered(self, event: Any) -> Any:
        event.sequence_number = self._num_events
        self._num_events += 1
        return event

    def _response(self, status: Status, **fields: Any) -> Response:
        """Return the response so far."""
        asked = self._asked
        same = {
            name: getattr(asked, name)
            for name in {*Response.__struct_fields__} & {*asked.__struct_fields__}
        }
        return Response(
            id=self.generation.id,
            created_at=self.generation.created_unix,
            status=status,
            output=Raw(encode_json([item.shown() for item in self._items])),
            **same
            | {
                "model": self.model_name,
                "parallel_tool_calls": bool(asked.parallel_tool_calls),
                "text": asked.text or TextOptions(),
                "top_logprobs": asked.top_logprobs or 0,
            },
            **fields,
        )


def _usage(usage: Usage) -> ResponseUsage:
    details = usage.prompt_tokens_details
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputDetails(0 if details is UNSET else details.cached_tokens),
        output_tokens=usage.completion_tokens,
        total_tokens=usage.total_tokens,
    )
