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

from srm.server.dialects.responses.items import (
    OutputCall,
    OutputItem,
    OutputMessage,
    OutputText,
    Status,
)
from srm.server.dialects.responses.reply import (
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
from srm.server.generation.detokenize import ChoicePart, join
from srm.server.generation.generation import Generation
from srm.server.http.responses import escape_line_ends
from srm.server.reply.call_reader import CallReader, is_whole
from srm.server.reply.format import NUMBER, TEXT, Format, encode_json, escape
from srm.server.reply.scores import ChatScores
from srm.server.schema.completion_response import Usage
from srm.server.schema.tools import Calls
from srm.server.text.text import Text


class ResponseScores(ChatScores):
    """Writes a list of `TokenLogprob`s."""

    _around, _no_bytes = b"[%b]", b"[]"


class _Event(msgspec.Struct):
    """The field that names an event."""

    type: str


_decode_event = msgspec.json.Decoder(_Event).decode


def type_of(document: bytes) -> str:
    """Return what an event is called."""
    return _decode_event(document).type


class Item(ABC):
    """An item of output that grows."""

    begin: ClassVar[bytes]
    """What stands before the JSON of an event with more of its text."""

    def __init__(self, place: int, id: str, name: str) -> None:
        """`id`: that of the reply; `name`: of the function that is called, or empty."""
        self.place = place
        self.name = name
        self.number = id.rpartition("_")[2]
        """The id without its prefix."""
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

    @property
    def decoded(self) -> str:
        """The text as it is."""
        return msgspec.json.decode(self.text, type=str)

    @property
    def is_whole(self) -> bool:
        """Whether it is whole although the text was cut."""
        return False

    @abstractmethod
    def shown(self) -> Any:
        """Return the item so far; without its content while that grows."""

    @abstractmethod
    def first_events(self) -> list[Any]:
        """Return the events before its text. If events have numbers, all lack them."""

    @abstractmethod
    def delta(self, text: str, scores: Any, place: int) -> Any:
        """Return the event with more text."""

    @abstractmethod
    def last_events(self) -> list[Any]:
        """Return the events behind its text."""


class _Message(Item):
    begin = b"event: response.output_text.delta\ndata: "

    @property
    def id(self) -> str:
        return f"msg_{self.number}"

    def shown(self) -> OutputItem:
        content = [] if self.status == "in_progress" else [self._part]
        return OutputMessage(id=self.id, status=self.status, content=content)

    @property
    def _part(self) -> OutputText:
        scores: Any = Raw(b"[%b]" % b",".join(self._scores))
        return OutputText(text=self.text, logprobs=scores)

    def first_events(self) -> list[Any]:
        return [
            ItemEvent("response.output_item.added", self.place, self.shown()),
            PartEvent("response.content_part.added", self.id, self.place, 0, self._part),
        ]

    def delta(self, text: str, scores: Any, place: int) -> Any:
        return TextDelta("response.output_text.delta", self.id, place, 0, text, scores)

    def last_events(self) -> list[Any]:
        part, at = self._part, (self.id, self.place, 0)
        return [
            TextDone("response.output_text.done", *at, part.text, part.logprobs),
            PartEvent("response.content_part.done", *at, part),
            ItemEvent("response.output_item.done", self.place, self.shown()),
        ]


class _Call(Item):
    begin = b"event: response.function_call_arguments.delta\ndata: "

    @property
    def id(self) -> str:
        return f"fc_{self.number}_{self.place}"

    @property
    def is_whole(self) -> bool:
        return is_whole(self.decoded)

    def shown(self) -> OutputItem:
        return OutputCall(
            id=self.id,
            call_id=f"call_{self.number}_{self.place}",
            name=self.name,
            arguments=self.text,
            status=self.status,
        )

    def first_events(self) -> list[Any]:
        return [ItemEvent("response.output_item.added", self.place, self.shown())]

    def delta(self, text: str, _scores: Any, place: int) -> Any:
        return ArgumentsDelta("response.function_call_arguments.delta", self.id, place, text)

    def last_events(self) -> list[Any]:
        at = self.id, self.place
        return [
            ArgumentsDone("response.function_call_arguments.done", *at, self.name, self.text),
            ItemEvent("response.output_item.done", self.place, self.shown()),
        ]


class ItemFormat(Format):
    """A reply that is a message, or calls, each a piece of output that grows."""

    scores_kind = ResponseScores
    last_event = b""
    message_kind: type[Item]
    call_kind: type[Item]
    """Made of their place, the reply's id, and the name of the function."""

    def __init__(
        self, generation: Generation, text: Text, model_name: str, calls: Calls | None
    ) -> None:
        super().__init__(generation, text, model_name)
        self.begin = (self.message_kind if calls is None else self.call_kind).begin
        self._calls = calls
        self._reader = CallReader()
        self.is_text = None if calls is not None and calls.may_be_text else calls is None
        """None: not known before there is some."""
        self._unknown: list[ChoicePart] = []  # that came before
        self.items: list[Item] = []
        self.is_full = False
        """Whether the limit of tokens ended it."""
        self.stop_string: str | int | None = None
        """What ended it otherwise."""

    @property
    def is_cut(self) -> bool:
        """Whether the limit ended it, or a stop string cut calls."""
        return self.is_full or (self.stop_string is not None and not self.is_text)

    def make_choice(self, part: ChoicePart, is_event: bool) -> Any:  # noqa: ARG002
        """Return the items of output."""
        self.begin_output()
        self.events([part])
        return [item.shown() for item in self.items]

    def events(self, parts: list[ChoicePart]) -> list[list[Any]]:
        events = []
        for part in parts:
            events += self._text_events(part)
            if part.finish_reason is not None:
                self.is_full = part.finish_reason == "length"
                self.stop_string = part.stop_reason
                events += self._end_item()
        return [events] if events else []

    def frame(self, documents: Sequence[bytes]) -> bytes:
        names = [type_of(document).encode() for document in documents]
        events = zip(names, map(escape_line_ends, documents), strict=True)
        return b"".join(b"event: %b\ndata: %b\n\n" % event for event in events)

    def numbered(self, event: Any) -> Any:
        """Return an event that is sent next, with its number if events have any."""
        return event

    def begin_output(self) -> list[Any]:
        """Begin the one item, if it is known to be the one."""
        if self._calls is None:
            return self._begin_item(self.message_kind)
        if self._calls.is_one_function:
            return self._begin_item(self.call_kind, self._calls.functions[0].name)
        return []

    def _text_events(self, part: ChoicePart) -> list[Any]:
        """Return the events with what is new."""
        calls = self._calls
        if part.text is TEXT and calls is not None and not calls.is_one_function:
            raise ValueError("what a part says depends on the text before")
        events: list[Any] = []
        if self.is_text is None and calls is not None:
            self._unknown.append(part)
            if not part.text and part.finish_reason is None:
                return []
            part = join(self._unknown)
            self.is_text = calls.is_text(part.text)
            events = self._begin_item(self.message_kind) if self.is_text else []
        if self.is_text or (calls is not None and calls.is_one_function):
            wants_scores = self.is_text and self.request.logprobs is not None
            if part.text or (wants_scores and part.num_tokens):
                events.append(self._delta(part.text, self.logprobs(part), part.index))
            return events
        for piece in self._reader.read(part.text):
            if piece.name is None:
                events.append(self._delta(piece.arguments))
            else:
                events += [*self._end_item(), *self._begin_item(self.call_kind, piece.name)]
        return events

    def _delta(self, text: str, scores: Any = None, index: int = 0) -> Any:
        item, scores = self.items[-1], [] if scores is None else scores
        if text is TEXT:  # an example, which is not sent
            event = item.delta(TEXT, scores, index)
            if self.has_numbers:
                event.sequence_number = NUMBER
            return event
        item.add(escape(text), bytes(scores))
        return self.numbered(item.delta(text, scores, item.place))

    def _begin_item(self, kind: type[Item], name: str = "") -> list[Any]:
        item = kind(len(self.items), self.generation.id, name)
        self.items.append(item)
        return [*map(self.numbered, item.first_events())]

    def _end_item(self) -> list[Any]:
        """End the last item, if one goes on."""
        if not self.items or self.items[-1].status != "in_progress":
            return []
        item = self.items[-1]
        item.status = "incomplete" if self.is_cut and not item.is_whole else "completed"
        return [*map(self.numbered, item.last_events())]


class ResponsesFormat(ItemFormat):
    """A Response, or its events."""

    message_kind, call_kind = _Message, _Call
    has_numbers = True
    engine_fields: ClassVar[dict[str, str]] = {
        "prompt_token_ids": "input",
        "max_tokens": "max_output_tokens",
        "logprobs": "top_logprobs",
    }

    def __init__(
        self,
        generation: Generation,
        text: Text,
        model_name: str,
        asked: ResponseRequest,
        calls: Calls | None = None,
    ) -> None:
        super().__init__(generation, text, model_name, calls)
        self._asked = asked
        self._num_events = 0

    def opening(self, parts: list[ChoicePart]) -> list[Any]:
        if not parts[0].is_first:
            return []
        kinds: tuple[EventType, ...] = ("response.created", "response.in_progress")
        events = [ResponseEvent(kind, self._response("in_progress")) for kind in kinds]
        return [*map(self.numbered, events), *self.begin_output()]

    def envelope(self, fields: dict[str, Any], is_event: bool) -> Any:
        """An event is whole as it is; behind the last one there is the response."""
        if is_event and fields["choices"]:
            return fields["choices"][0]
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
            self.items[-1].status = "completed" if self.items[-1].is_whole else "incomplete"
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
        asked = self._asked
        effort = None if asked.reasoning is None else asked.reasoning.effort
        same: dict[str, Any] = {
            name: getattr(asked, name)
            for name in {*Response.__struct_fields__} & {*asked.__struct_fields__}
        }
        return Response(
            id=self.generation.id,
            created_at=self.generation.created_unix,
            status=status,
            output=Raw(encode_json([item.shown() for item in self.items])),
            **same
            | {
                "model": self.model_name,
                "parallel_tool_calls": bool(asked.parallel_tool_calls),
                "reasoning": Reasoning(effort),
                "store": False,
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
