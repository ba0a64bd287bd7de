"""Encodes the choices of a stream's event from arrays: text only, all completions at once.

An event is one join of pieces made before: a choice's beginning, which is made once for every
index, the text of its tokens as JSON, and its end. Completions that end, or whose text may be cut
inside a character, are made one by one. Knows the shape of a choice only from an example.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Collection

import msgspec
import numpy as np
import numpy.typing as npt

from engine.messages import REASONS
from engine.steps.token_deltas import TokenDeltas
from server.text.text import Text

_MARK = 77_777_777
_Utf8 = codecs.getincrementaldecoder("utf-8")
_I64 = npt.NDArray[np.int64]
_Pieces = npt.NDArray[np.object_]

Encode = Callable[[int, str, str | None, str | int | None], bytes]
"""A choice as JSON, of index, text, finish_reason and stop_reason."""


class Template:
    """The JSON around a choice's text, taken from an encoded example."""

    def __init__(self, encode: Encode) -> None:
        self._encode = encode
        self._begin, self._between, self.end = self._parts(None, None)
        self._heads: _Pieces = np.empty(0, np.object_)

    def _parts(
        self, finish_reason: str | None, stop_reason: str | int | None
    ) -> tuple[bytes, bytes, bytes]:
        example = self._encode(_MARK, f"{_MARK}", finish_reason, stop_reason)
        begin, between, end = example.split(b"%d" % _MARK)
        return begin, between, end

    def heads(self, size: int) -> _Pieces:
        """Return object[at least size]: by index, a comma and the JSON before the text."""
        known = len(self._heads)
        if size > known:
            new = [self.head(index) for index in range(known, max(size, 2 * known, 64))]
            self._heads = np.append(self._heads, np.array([b"," + one for one in new], np.object_))
        return self._heads

    def head(self, index: int) -> bytes:
        return b"%b%d%b" % (self._begin, index, self._between)

    def ended(self, finish_reason: str, stop_reason: str | int | None) -> bytes:
        """Return the JSON after the text of a completion that ends."""
        return self._parts(finish_reason, stop_reason)[2]


class Pieces:
    """The text of every token as JSON."""

    def __init__(self, text: Text) -> None:
        self.text = text
        self.json: _Pieces = np.empty(text.model.vocab_size, np.object_)
        self.is_whole = np.zeros(text.model.vocab_size, np.bool_)
        """Whether each token is whole characters, and at least one."""
        for token in range(text.model.vocab_size):
            piece = text.decode(token.to_bytes(4, "little"))
            try:
                self.json[token] = escaped(piece.decode())
                self.is_whole[token] = len(piece) > 0
            except UnicodeDecodeError:
                self.json[token] = b""


def escaped(text: str) -> bytes:
    """Return the text as JSON, without the quotation marks."""
    return msgspec.json.encode(text)[1:-1]


class Choices:
    """Renders the completions of one request as their text grows."""

    def __init__(
        self,
        pieces: Pieces,
        template: Template,
        num_choices: int,
        stop_token_ids: Collection[int],
    ) -> None:
        self._pieces = pieces
        self._template = template
        self._stop_token_ids = stop_token_ids
        self._heads = template.heads(num_choices)
        self._end = template.end
        # Whether each completion's text ends inside a character.
        self._is_cut = np.zeros(num_choices, np.bool_)
        self._decoders: dict[int, codecs.IncrementalDecoder] = {}

    def render(self, news: TokenDeltas) -> list[bytes]:
        """Return the choices with news as JSON, maybe all in one, with commas."""
        if len(news.indices) > 2:  # arrays would cost more than they save
            rendered = self._many(news)
            return [rendered] if rendered else []
        return [*filter(None, (self._one(news, entry) for entry in range(len(news.indices))))]

    def _many(self, news: TokenDeltas) -> bytes:
        is_odd = (news.reasons != 0) | self._is_cut[news.indices]
        is_whole = self._pieces.is_whole[news.token_ids]
        if not is_whole.all():
            parts = np.zeros(len(is_whole) + 1, np.int64)
            np.cumsum(~is_whole, out=parts[1:])
            is_odd |= parts[news.offsets[1:]] > parts[news.offsets[:-1]]
        if not is_odd.any():
            return self._joined(news.indices, np.diff(news.offsets), news.token_ids)
        counts = np.diff(news.offsets)
        tokens = news.token_ids[np.repeat(~is_odd, counts)]
        rest = (self._one(news, entry) for entry in np.flatnonzero(is_odd).tolist())
        whole = self._joined(news.indices[~is_odd], counts[~is_odd], tokens)
        return b",".join(filter(None, (whole, *rest)))

    def _joined(self, indices: _I64, counts: _I64, token_ids: npt.NDArray[np.int32]) -> bytes:
        """Return the JSON of completions that have only whole characters, in one pass."""
        if not len(indices):
            return b""
        ends = np.cumsum(counts)
        places = np.arange(len(indices)) * 2
        parts = np.empty(len(token_ids) + 2 * len(indices), np.object_)
        parts.fill(self._end)
        parts[ends - counts + places] = self._heads[indices]
        parts[np.arange(len(token_ids)) + np.repeat(places + 1, counts)] = self._pieces.json[
            token_ids
        ]
        return b"".join(parts.tolist())[1:]  # without the first comma

    def _one(self, news: TokenDeltas, entry: int) -> bytes | None:
        """A choice of any kind; None if it has nothing to say."""
        index = int(news.indices[entry])
        token_ids = news.tokens_of(entry)
        finish_reason = REASONS[int(news.reasons[entry])]
        if len(token_ids) == 4 and finish_reason is None and not self._is_cut[index]:
            token = int.from_bytes(token_ids, "little")
            if self._pieces.is_whole[token]:
                return b"%b%b%b" % (self._heads[index][1:], self._pieces.json[token], self._end)
        stop_reason: int | None = None
        if finish_reason == "stop":  # the token that stopped it is not text
            last = int.from_bytes(token_ids[-4:], "little")
            stop_reason = last if last in self._stop_token_ids else None
            token_ids = token_ids[:-4]
        decoder = self._decoders.pop(index, None) or _Utf8("replace")
        text = decoder.decode(self._pieces.text.decode(token_ids), finish_reason is not None)
        is_cut = bool(decoder.getstate()[0])
        if is_cut or self._is_cut[index]:
            self._is_cut[index] = is_cut
        if is_cut:
            self._decoders[index] = decoder
        if finish_reason is None:
            return b"%b%b%b" % (self._heads[index][1:], escaped(text), self._end) if text else None
        end = self._template.ended(finish_reason, stop_reason)
        return b"%b%b%b" % (self._heads[index][1:], escaped(text), end)
