"""ItemFormat: a reply that is a text, or calls, each an item of output that grows.

A stream says everything several times: that an item begins, more of it, and all of it. So what was
sent is kept, as the JSON that it was sent as. A dialect says in which events.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import msgspec
from msgspec import Raw

from srm.server.generation.detokenize import ChoicePart, join
from srm.server.generation.generation import Generation
from srm.server.http.responses import escape_line_ends
from srm.server.reply.call_reader import CallReader, is_whole
from srm.server.reply.format import NUMBER, TEXT, Format, escape
from srm.server.schema.tools import Calls


class _Event(msgspec.Struct):
    """The field that names an event."""

    type: str


_decode_event = msgspec.json.Decoder(_Event).decode


def type_of(document: bytes) -> str:
    """Return what an event is called."""
    return _decode_event(document).type


class Item:
    """A text, or a call of a function."""

    def __init__(self, place: int, name: str | None) -> None:
        """`name`: of the function that is called; None: it is a text."""
        self.place = place
        self.name = name
        self.status: Literal["in_progress", "completed", "incomplete"] = "in_progress"
        self._texts: list[bytes] = []
        self._scores: list[bytes] = []

    def add(self, text: bytes, scores: bytes) -> None:
        """Note more of its text, as JSON without quotation marks, and a list of its scores."""
        self._texts.append(text)
        if len(scores) > len(b"[]"):
            self._scores.append(scores[1:-1])

    def end(self, is_cut: bool) -> None:
        """Note that nothing is added; `is_cut`: to the reply, which was to have more."""
        self.status = "incomplete" if is_cut and not self.is_whole else "completed"

    @property
    def text(self) -> Any:
        """Its text so far, as JSON that stands where the structs have a string."""
        return Raw(b'"%b"' % b"".join(self._texts))

    @property
    def scores(self) -> Any:
        """The list of its scores so far, as JSON."""
        return Raw(b"[%b]" % b",".join(self._scores))

    @property
    def decoded(self) -> str:
        """The text as it is."""
        return msgspec.json.decode(self.text, type=str)

    @property
    def is_whole(self) -> bool:
        """Whether it is a call that is whole although the text was cut."""
        return self.name is not None and is_whole(self.decoded)


class ItemFormat(Format):
    """A reply of one text, or of calls."""

    last_event = b""
    text_delta: ClassVar[str]
    call_delta: ClassVar[str]
    """The events with more of a text, and of a call."""

    def __init__(self, generation: Generation, calls: Calls | None = None) -> None:
        super().__init__(generation)
        delta = self.text_delta if calls is None else self.call_delta
        self.begin = f"event: {delta}\ndata: ".encode()
        self.number = generation.id.rpartition("_")[2]
        """The reply's id without its prefix."""
        self._calls = calls
        self._reader = CallReader(calls)
        self.is_text = None if calls is not None and calls.may_be_text else calls is None
        """None: not known before there is some."""
        self._unknown: list[ChoicePart] = []  # that came before
        self.items: list[Item] = []
        self.is_full = False
        """Whether the limit of tokens ended it."""
        self.is_aborted = False
        """Whether an operator ended it."""
        self.stop_string: str | int | None = None
        """The stop string or token that ended it; None if the limit or the model's end did."""

    @abstractmethod
    def shown(self, item: Item) -> Any:
        """Return an item so far; a text without its content while that grows."""

    @abstractmethod
    def greeting(self) -> list[Any]:
        """Return the events that a stream begins with. If events have numbers, these and the
        following lack them."""

    @abstractmethod
    def first_events(self, item: Item) -> list[Any]:
        """Return the events before the text of an item."""

    @abstractmethod
    def delta(self, item: Item, text: str, scores: Any, place: int) -> Any:
        """Return the event with more text."""

    @abstractmethod
    def last_events(self, item: Item) -> list[Any]:
        """Return the events behind the text of an item."""

    @abstractmethod
    def ending(self, fields: dict[str, Any], is_event: bool) -> Any:
        """Return the whole reply, or the event behind all items."""

    def numbered(self, event: Any) -> Any:
        """Return an event that is sent next, with its number if events have any."""
        return event

    @property
    def is_cut(self) -> bool:
        """Whether the limit or an operator ended it, or a stop string cut calls."""
        is_stopped = self.stop_string is not None and not self.is_text
        return self.is_full or self.is_aborted or is_stopped

    def make_choice(self, part: ChoicePart, is_event: bool) -> Any:  # noqa: ARG002
        """Return the items of output."""
        self._begin_output()
        self.events([part])
        return [self.shown(item) for item in self.items]

    def opening(self, parts: list[ChoicePart]) -> list[Any]:
        if not parts[0].is_first:
            return []
        return [*map(self.numbered, self.greeting()), *self._begin_output()]

    def events(self, parts: list[ChoicePart]) -> list[list[Any]]:
        events = []
        for part in parts:
            events += self._text_events(part)
            if part.finish_reason is not None:
                self.is_full = part.finish_reason == "length"
                self.is_aborted = part.finish_reason == "abort"
                self.stop_string = part.stop_reason
                events += self._end_item()
        return [events] if events else []

    def envelope(self, fields: dict[str, Any], is_event: bool) -> Any:
        """An event is whole as it is."""
        is_whole = is_event and fields["choices"]
        return fields["choices"][0] if is_whole else self.ending(fields, is_event)

    def frame(self, documents: Sequence[bytes]) -> bytes:
        names = [type_of(document).encode() for document in documents]
        events = zip(names, map(escape_line_ends, documents), strict=True)
        return b"".join(b"event: %b\ndata: %b\n\n" % event for event in events)

    def _begin_output(self) -> list[Any]:
        """Begin the one item, if it is known to be the one."""
        if self._calls is None:
            return self._begin_item(None)
        return [event for head in self._reader.heads for event in self._begin_item(head.name)]

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
            events = self._begin_item(None) if self.is_text else []
        if self.is_text:
            if part.text or (self.request.logprobs is not None and part.num_tokens):
                events.append(self._delta(part.text, self.logprobs(part), part.index))
            return events
        for piece in self._reader.read(part.text):
            if piece.name is None:
                events.append(self._delta(piece.arguments, None, part.index))
            else:
                events += [*self._end_item(), *self._begin_item(piece.name)]
        return events

    def _delta(self, text: str, scores: Any, index: int) -> Any:
        item, scores = self.items[-1], [] if scores is None else scores
        if text is TEXT:  # an example, which is not sent
            event = self.delta(item, TEXT, scores, index)
            if self.has_numbers:
                event.sequence_number = NUMBER
            return event
        item.add(escape(text), bytes(scores))
        return self.numbered(self.delta(item, text, scores, item.place))

    def _begin_item(self, name: str | None) -> list[Any]:
        item = Item(len(self.items), name)
        self.items.append(item)
        return [*map(self.numbered, self.first_events(item))]

    def _end_item(self) -> list[Any]:
        """End the last item, if one goes on."""
        if not self.items or self.items[-1].status != "in_progress":
            return []
        self.items[-1].end(self.is_cut)
        return [*map(self.numbered, self.last_events(self.items[-1]))]
