"""Format: the shape of one kind of reply, and what of its events is encoded once.

A dialect is a subclass: it says which choices an event has and what is in them. A Template is JSON
with holes, made of an encoded example with marks in the places of what changes; a ChoiceTemplate is
that of a choice. When an event is made, and which way, is for `renderer.py`.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from functools import cached_property
from sys import getsizeof
from typing import Any, ClassVar, NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import UNSET, Raw, UnsetType

from srm.engine.messages import FinishReason, Output
from srm.engine.receipt import Receipt
from srm.engine.steps.tokens import Tokens
from srm.memory import Cache
from srm.server import metrics
from srm.server.generation.detokenize import ChoicePart
from srm.server.generation.generation import Generation
from srm.server.http.responses import DONE, escape_line_ends, frame, frame_error
from srm.server.reply.prompt import ShownPrompt
from srm.server.reply.scores import ScoreWriter, scores_of
from srm.server.schema.completion_response import Usage, VersionSpan

encode_json = msgspec.json.Encoder().encode


def _number() -> int:
    return 2**52 + secrets.randbits(52)


TEXT = secrets.token_hex(16)
"""Marks a text; within its quotation marks."""
SCORES = Raw(encode_json(secrets.token_hex(16)))
"""Marks a value of any kind."""
CHOICES = Raw(encode_json({secrets.token_hex(16): 0}))
"""Marks an object."""
INDEX, OTHER_INDEX, COMPLETION_TOKENS, NUMBER = (_number() for _ in range(4))
"""Mark numbers; NUMBER is one of which each event has another, behind text and scores. No client or
operator can name any of these: they are drawn when this starts."""

NO_TEMPLATE = (LookupError, TypeError, ValueError)
"""Errors of a format that cannot encode the example, or has its holes in another order."""


class Template:
    """The bytes between the holes of an example."""

    def __init__(self, example: bytes, *marks: str | int | Raw) -> None:
        """Raises ValueError if these marks are not in the example in this order."""
        pieces = []
        for mark in marks:
            data = bytes(mark) if isinstance(mark, Raw) else str(mark).encode()
            piece, separator, example = example.partition(data)
            if not separator:
                raise ValueError("the holes of the example are in another order")
            pieces.append(piece)
        self.pieces = (*pieces, example)
        """One more than there are marks."""


def escape(text: str) -> bytes:
    """Return the text as JSON, without the quotation marks, for an event of a stream."""
    return escape_line_ends(encode_json(text)[1:-1])


_Unasked = TypeVar("_Unasked")
UsageField = Usage | UnsetType | None
"""UNSET (absent), null, or the usage."""


class Format(ABC):
    """Writes the replies to one request as structs."""

    scores_kind: ClassVar[type[ScoreWriter]]
    """How its choices say scores."""
    may_share_events: ClassVar[bool] = False
    """Whether an event can have several choices."""
    is_one_event: ClassVar[bool] = False
    """Whether a choice's first text, all the others and its end are events of the same shape."""
    begin: bytes = b"data: "
    """What stands before the JSON of an event that only adds text to a choice."""
    has_numbers: ClassVar[bool] = False
    """Whether NUMBER is in its events."""
    last_event: ClassVar[bytes] = DONE
    """What a stream ends with."""
    engine_fields: ClassVar[dict[str, str]] = {"prompt_token_ids": "prompt"}
    """Its request's fields by those of the engine, where these have other names."""
    frame = staticmethod(frame)
    frame_error = staticmethod(frame_error)
    """Make events of JSON documents, and one of an error that ends a stream."""

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        self.request = generation.request
        self.wants_tokens = self.request.return_token_ids or self.request.return_weight_versions
        """Whether choices say something of each token, of those without text too."""
        as_ids = self.request.return_tokens_as_token_ids
        self.scores = scores_of(self.scores_kind, generation.text, as_ids)
        self.keep: Callable[[bytes], Awaitable[None]] | None = None
        """Keeps the JSON of the whole reply, before its client has all of it; None: nothing does.
        The reply fails with what this raises."""

    @abstractmethod
    def make_choice(self, part: ChoicePart, is_event: bool) -> msgspec.Struct:
        """Return a finished choice, of a whole reply or in an event of a stream."""

    @abstractmethod
    def events(self, parts: list[ChoicePart]) -> list[list[msgspec.Struct]]:
        """Return the choices of each event for these parts; none if there is nothing to send."""

    def field_of(self, name: str) -> str:
        """Return its request's field that the engine calls `name`."""
        return self.engine_fields.get(name, name)

    def opening(self, _parts: list[ChoicePart]) -> list[msgspec.Struct]:
        """Return choices that announce a completion, before any of its text."""
        return []

    @abstractmethod
    def envelope(self, fields: dict[str, Any], is_event: bool) -> msgspec.Struct:
        """Return the reply or event with these fields."""

    def first_fields(self) -> dict[str, Any]:
        """Return fields of a whole reply, and of a stream's first event."""
        return {}

    def numbers(self, _text: bytes, _scores: bytes) -> tuple[int, ...]:
        """Return what goes into NUMBER of an event that is sent with this text and scores, as JSON,
        without a call of `events`."""
        return ()

    @cached_property
    def prompts(self) -> list[ShownPrompt]:
        """Return each prompt as replies show it."""
        prompts = self.generation.prompts
        return [ShownPrompt(prompt, self.request, self.scores) for prompt in prompts]

    def logprobs(self, part: ChoicePart, before: list[Any] | None = None) -> Any:
        """Return the JSON of a choice's scores, after the entries `before` them, if they are asked
        for. It stands where the reply's struct, which tells who decodes it, has an object."""
        if self.request.logprobs is None:
            return None
        if part.text is TEXT:
            return SCORES
        return self.scores.render(
            part.tokens, self.request.logprobs, part.text_offset, before or ()
        )

    def versions(self, part: ChoicePart) -> list[VersionSpan] | UnsetType:
        """Return which weights made a choice's tokens, if that is asked for."""
        return part.versions if self.request.return_weight_versions else UNSET

    def receipt(self, part: ChoicePart) -> Receipt | UnsetType:
        """Return the receipt of a whole choice, if it is asked for."""
        return self.generation.receipt(part) if self.request.receipt else UNSET

    def token_ids(self, part: ChoicePart, unasked: _Unasked) -> list[int] | _Unasked:
        """Return the token ids of a choice, or `unasked` if they are not asked for."""
        if not self.request.return_token_ids:
            return unasked
        return memoryview(part.token_ids).cast("i").tolist()


class EventTemplate(NamedTuple):
    """The bytes around the text and the scores of an event of one choice."""

    begin: bytes
    before_scores: bytes
    end: bytes
    """If it says counts, they are formatted into it."""
    has_counts: bool


_known = Cache[tuple[type["Format"], bool, bytes], tuple[bytes, ...]](
    8 * 1024 * 1024, metrics.CACHE_BYTES.labels("choice templates").set
)
"""The pieces of encoded examples."""
_heads = Cache[tuple[bytes, bytes, int], npt.NDArray[np.object_]](
    32 * 1024 * 1024, metrics.CACHE_BYTES.labels("choice beginnings").set
)


class ChoiceTemplate:
    """The bytes around the text of a choice in the events of one request.

    A choice may show what its request says: only requests whose example is the same share them.
    """

    def __init__(self, form: Format) -> None:
        """Raises ValueError if the format has index, text and scores in another order, or shows
        anything else of the tokens; and what the format raises for an example (NO_TEMPLATE)."""
        self._form = form
        self._begin, self._between, *scores, self._end = self._pieces(None, None)
        self._before_scores = scores[0] if scores else b""
        self._ends: dict[tuple[FinishReason | None, str | int | None], bytes | None] = {}

    def in_event(self, index: int, around: Template) -> EventTemplate:
        """Return the template of a choice's events, which have these bytes around the choice."""
        begin, *behind = around.pieces
        end = [*Template(self._end, *[NUMBER] * self._form.has_numbers).pieces]
        end[-1] += behind[0]
        end += behind[1:]
        end[-1] += b"\n\n"
        if has_counts := len(end) > 1:
            end = [piece.replace(b"%", b"%%") for piece in end]
        return EventTemplate(
            b"%b%b%b%d%b" % (self._form.begin, begin, self._begin, index, self._between),
            *(self._before_scores, b"%d".join(end), has_counts),
        )

    def heads(self, size: int) -> npt.NDArray[np.object_]:
        """Return object[at least size]: by index, a comma and the JSON before the text."""
        key = self._begin, self._between, 1 << (size - 1).bit_length()
        if (heads := _heads.get(key)) is None:
            parts = [b",%b%d%b" % (self._begin, index, self._between) for index in range(key[2])]
            heads = np.array(parts, np.object_)
            _heads.put(key, heads, heads.nbytes + sum(map(getsizeof, parts)))
        return heads

    def end(
        self, finish_reason: FinishReason | None, stop_reason: str | int | None
    ) -> bytes | None:
        """Return the JSON after the text of a choice, which ends if there is a reason; None if then
        more is different."""
        key = finish_reason, stop_reason
        if key not in self._ends:
            try:
                *begin, end = self._pieces(*key)
            except NO_TEMPLATE:
                begin, end = [], b""
            self._ends[key] = end if begin == [self._begin, self._between] else None
        return self._ends[key]

    def join(self, heads: npt.NDArray[np.object_], tokens: Tokens, pieces: Any) -> bytes:
        """Return choices that go on, of tokens of whole characters, with commas."""
        if not len(tokens):
            return b""
        counts, ends = np.diff(tokens.offsets), tokens.offsets[1:]
        places = np.arange(len(tokens)) * 2
        parts = np.empty(len(tokens.token_ids) + 2 * len(tokens), np.object_)
        parts.fill(self._end)
        parts[ends - counts + places] = heads[tokens.owners]
        inner = np.arange(len(tokens.token_ids)) + np.repeat(places + 1, counts)
        parts[inner] = pieces[tokens.token_ids]
        return b"".join(parts.tolist())[1:]  # without the first comma

    def _pieces(
        self, finish_reason: FinishReason | None, stop_reason: str | int | None
    ) -> tuple[bytes, ...]:
        has_scores = self._form.request.logprobs is not None
        scores, known = (SCORES,) if has_scores else (), None
        for index, token_ids in ((INDEX, bytes(4)), (OTHER_INDEX, b"")):
            tokens = Output("", index, token_ids)
            part = ChoicePart(index, False, TEXT, tokens, [], finish_reason, stop_reason)
            [[choice]] = self._form.events([part])
            example = encode_json(choice)
            if known is None:
                key = type(self._form), has_scores, example
                if (before := _known.get(key)) is not None:
                    return before
                known = Template(example, INDEX, TEXT, *scores).pieces
            elif Template(example, index, TEXT, *scores).pieces != known:
                raise ValueError("choices differ in more than index, text and scores")
        assert known is not None
        _known.put(key, known, len(example) + sum(map(getsizeof, known)))
        return known
