"""ChoiceTemplate: a choice of one format with a hole for its text, so that it is encoded once."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from engine.messages import FinishReason
from engine.steps.tokens import Tokens
from server.generation.detokenize import ChoicePart
from server.reply.format import Format
from server.reply.template import INDEX, SCORES, TEXT, Template, encode_json


class EventTemplate(NamedTuple):
    """The bytes around the text and the scores of an event of one choice."""

    begin: bytes
    before_scores: bytes
    end: bytes
    """If it says counts, they are formatted into it."""
    has_counts: bool


class ChoiceTemplate:
    """The bytes around the text of a choice in the events of one format."""

    _known: ClassVar[dict[tuple[type[Format], bool], ChoiceTemplate]] = {}

    def __init__(self, form: Format) -> None:
        """Raises ValueError if the format has index, text and scores in another order."""
        marks = (INDEX, TEXT, SCORES) if form.request.logprobs is not None else (INDEX, TEXT)
        self._begin, self._between, *scores, self._end = Template(
            self._example(form, None, None), *marks
        ).pieces
        self._before_scores = scores[0] if scores else b""
        self._heads: npt.NDArray[np.object_] = np.empty(0, np.object_)
        self._ends: dict[tuple[str | None, str | int | None], bytes] = {(None, None): self._end}

    @classmethod
    def from_format(cls, form: Format) -> ChoiceTemplate:
        """Return that of a format whose choices go on with text alone, or text and scores."""
        key = type(form), form.request.logprobs is not None
        if key not in cls._known:
            cls._known[key] = cls(form)
        return cls._known[key]

    def in_event(self, index: int, around: Template) -> EventTemplate:
        """Return the template of a choice's events, which have these bytes around the choice."""
        begin, *end = around.pieces
        end[0] = self._end + end[0]
        end[-1] += b"\n\n"
        if has_counts := len(end) > 1:
            end = [piece.replace(b"%", b"%%") for piece in end]
        return EventTemplate(
            b"data: %b%b%d%b" % (begin, self._begin, index, self._between),
            *(self._before_scores, b"%d".join(end), has_counts),
        )

    def heads(self, size: int) -> npt.NDArray[np.object_]:
        """Return object[at least size]: by index, a comma and the JSON before the text."""
        known = len(self._heads)
        if size > known:
            indices = range(known, max(size, 2 * known, 64))
            new = [b",%b%d%b" % (self._begin, index, self._between) for index in indices]
            self._heads = np.append(self._heads, np.array(new, np.object_))
        return self._heads

    def end(
        self, form: Format, finish_reason: FinishReason | None, stop_reason: str | int | None
    ) -> bytes:
        """Return the JSON after the text of a choice, which ends if there is a reason."""
        key = finish_reason, stop_reason
        if key not in self._ends:
            example = self._example(form, finish_reason, stop_reason)
            self._ends[key] = Template(example, INDEX, TEXT).pieces[-1]
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

    def _example(
        self, form: Format, finish_reason: FinishReason | None, stop_reason: str | int | None
    ) -> bytes:
        part = ChoicePart(INDEX, False, TEXT, b"", b"", b"", b"", [], finish_reason, stop_reason)
        [[choice]] = form.events([part])
        return encode_json(choice)
