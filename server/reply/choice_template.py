"""ChoiceTemplate: a choice of one format with a hole for its text, so that it is encoded once."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from srm.engine.messages import FinishReason, Output
from srm.engine.steps.tokens import Tokens
from srm.server.generation.detokenize import ChoicePart
from srm.server.reply.format import Format
from srm.server.reply.template import (
    INDEX,
    NO_TEMPLATE,
    NUMBER,
    OTHER_INDEX,
    SCORES,
    TEXT,
    Template,
    encode_json,
)


class EventTemplate(NamedTuple):
    """The bytes around the text and the scores of an event of one choice."""

    begin: bytes
    before_scores: bytes
    end: bytes
    """If it says counts, they are formatted into it."""
    has_counts: bool


MOST_KNOWN = 64
"""Examples after which those before are made again."""


class ChoiceTemplate:
    """The bytes around the text of a choice in the events of one request.

    A choice may show what its request says: only requests whose example is the same share them.
    """

    _known: ClassVar[dict[tuple[type[Format], bool, bytes], tuple[bytes, ...]]] = {}
    """The pieces of encoded examples."""

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
        return _heads(self._begin, self._between, 1 << (size - 1).bit_length())

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
        reasons = finish_reason, stop_reason
        example = self._example(INDEX, bytes(4), reasons)
        has_scores = self._form.request.logprobs is not None
        if (key := (type(self._form), has_scores, example)) not in self._known:
            scores = (SCORES,) if has_scores else ()
            pieces = Template(example, INDEX, TEXT, *scores).pieces
            other = self._example(OTHER_INDEX, b"", reasons)
            if Template(other, OTHER_INDEX, TEXT, *scores).pieces != pieces:
                raise ValueError("choices differ in more than index, text and scores")
            if len(self._known) == MOST_KNOWN:
                self._known.clear()
            self._known[key] = pieces
        return self._known[key]

    def _example(
        self, index: int, token_ids: bytes, reasons: tuple[FinishReason | None, str | int | None]
    ) -> bytes:
        part = ChoicePart(index, False, TEXT, Output("", index, token_ids), [], *reasons)
        [[choice]] = self._form.events([part])
        return encode_json(choice)


@lru_cache(maxsize=32)
def _heads(begin: bytes, between: bytes, size: int) -> npt.NDArray[np.object_]:
    return np.array([b",%b%d%b" % (begin, index, between) for index in range(size)], np.object_)
