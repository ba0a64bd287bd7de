"""Log-probabilities of completions and chats as JSON, of any number of tokens.

Numbers are the engine's float32 and the same wherever a token appears; what is below LOWEST, such
as minus infinity, which JSON does not have, becomes LOWEST. Packed replies have bytes instead. What
is written of a token apart from numbers is made once for each model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from operator import add
from typing import Any

import msgspec
from msgspec import Raw

from srm.engine.messages import Output
from srm.server.http.responses import escape_line_ends
from srm.server.schema.completion_response import PromptLogprob
from srm.server.text.text import Text

LOWEST = -9999.0
_NOBODY = -1
"""Fills the place of a token where the vocabulary has no more."""

Name = Callable[[int], str]
Columns = tuple[Sequence[int], Sequence[float], Sequence[int], Sequence[float]]
"""What an Output has, as numbers: token ids, logprobs, and of alternatives equally many of each."""


def _unpack(scored: Output) -> Columns:
    ids, logprobs = array("i", scored.token_ids), array("f", scored.logprobs)
    return ids, logprobs, array("i", scored.top_ids), array("f", scored.top_logprobs)


def _width(scored: Columns) -> int:
    """Return how many alternatives each token has."""
    return len(scored[2]) // max(len(scored[0]), 1)


def naming(text: Text, as_ids: bool) -> Name:
    """Return how tokens are written: as their text, or as `token_id:17`."""
    return _id_name if as_ids else text.labels.__getitem__


def _id_name(token: int) -> str:
    return f"token_id:{token}"


def encode_numbers(values: Sequence[float]) -> list[bytes]:
    """Return the numbers as JSON."""
    if not values:
        return []
    shown = [*values] if min(values) >= LOWEST else [max(value, LOWEST) for value in values]
    return msgspec.json.encode(shown)[1:-1].split(b",")


class _Remembered(dict[int, bytes]):
    """The bytes of each token, made when they are first asked for."""

    def __init__(self, make: Callable[[int], bytes]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, token: int) -> bytes:
        made = self[token] = escape_line_ends(self._make(token))
        return made


class ScoreWriter(ABC):
    """Writes the scores of one kind of reply. An entry is what is written of one token."""

    def __init__(self, text: Text, as_ids: bool) -> None:
        self.name = naming(text, as_ids)
        self._text = text
        self._begin = _Remembered(self._before)  # what stands before a token's number
        self._is_shared = bytearray(text.model.vocab_size)
        """By token: whether another one has its name."""
        if not as_ids:
            counts = Counter(text.labels)
            self._is_shared[:] = bytes(counts[label] > 1 for label in text.labels)

    def render(
        self, scored: Output, num_top: int, offsets: list[int], before: Sequence[Any] = ()
    ) -> Raw:
        """Return the scores of a choice's tokens and of `num_top` likeliest ones in the place of
        each, after the entries `before` them. `offsets` are characters before each token."""
        return Raw(self._join([*before, *self.entries(scored, num_top)], offsets))

    def entries(self, scored: Output, num_top: int) -> list[Any]:
        """Return the entry of each token."""
        return self._entries(columns := _unpack(scored), min(num_top, _width(columns)))

    def render_each(
        self, scored: Columns, offsets: Sequence[int], counts: Sequence[int]
    ) -> list[bytes]:
        """Return the scores of many choices, which ask for as many likeliest ones, and each have
        as many tokens as `counts` says."""
        entries = self._entries(scored, _width(scored))
        if len(counts) == len(entries):
            return [*map(self._join_one, entries, offsets)]
        bounds = pairwise(accumulate(counts, initial=0))
        return [self._join(entries[begin:end], offsets[begin:end]) for begin, end in bounds]

    @abstractmethod
    def _entries(self, scored: Columns, num_top: int) -> list[Any]:
        """Return the entry of each token, of whose likeliest ones `num_top` are shown."""

    @abstractmethod
    def _before(self, token: int) -> bytes:
        """Return what stands before a token's number."""

    @abstractmethod
    def _join(self, entries: Sequence[Any], offsets: Sequence[int]) -> bytes:
        """Return entries as what a choice has."""

    @abstractmethod
    def _join_one(self, entry: Any, offset: int) -> bytes:
        """Return the same of one entry, several times as fast."""


class CompletionScores(ScoreWriter):
    """Writes a `Logprobs`; an entry is a token's name, its number and the likeliest ones."""

    def entries_of_prompt(self, first: int, rest: Output, num_top: int) -> list[Any]:
        """Return the entries of a prompt: its first token, and the others with their scores."""
        return [(self._begin[first][:-1], b"null", b"null"), *self.entries(rest, num_top)]

    def _before(self, token: int) -> bytes:
        return msgspec.json.encode(self.name(token)) + b":"

    def _entries(self, scored: Columns, num_top: int) -> list[tuple[bytes, bytes, bytes]]:
        token_ids, logprobs, top_ids, top_logprobs = scored
        begin, is_shared, width = self._begin, self._is_shared, _width(scored)
        numbers, top_numbers = encode_numbers(logprobs), encode_numbers(top_logprobs)
        own = [*map(add, map(begin.__getitem__, token_ids), numbers)]
        tops = [b"{%b}" % pair for pair in own]
        if width and num_top:
            is_odd = _NOBODY in top_ids or any(is_shared[token] for token in (*top_ids, *token_ids))
            pairs = [] if is_odd else [*map(add, map(begin.__getitem__, top_ids), top_numbers)]
            for place, token in enumerate(token_ids):
                at = slice(place * width, place * width + num_top)
                ids = top_ids[at]
                if is_odd:
                    tops[place] = self._by_name(token, numbers[place], ids, top_numbers[at])
                elif token in ids:
                    tops[place] = b"{%b}" % b",".join(pairs[at])
                else:
                    tops[place] = b"{%b,%b}" % (b",".join(pairs[at]), own[place])
        names = [begin[token][:-1] for token in token_ids]
        return [*zip(names, numbers, tops, strict=True)]

    def _by_name(
        self, token: int, number: bytes, top_ids: Sequence[int], top_numbers: list[bytes]
    ) -> bytes:
        """Return the likeliest tokens and the token itself by name; of two with one name, the
        second by id."""
        pairs = [*zip(top_ids, top_numbers, strict=True)]
        raw_scores: dict[str, Raw] = {}
        for other, shown in pairs if token in top_ids else [*pairs, (token, number)]:
            if other != _NOBODY:
                label = self.name(other)
                raw_scores[_id_name(other) if label in raw_scores else label] = Raw(shown)
        return escape_line_ends(msgspec.json.encode(raw_scores))

    def _join(self, entries: Sequence[tuple[bytes, bytes, bytes]], offsets: Sequence[int]) -> bytes:
        names, numbers, tops = zip(*entries, strict=True) if entries else ((), (), ())
        return b'{"tokens":[%b],"token_logprobs":[%b],"top_logprobs":[%b],"text_offset":%b}' % (
            *(b",".join(names), b",".join(numbers), b",".join(tops)),
            msgspec.json.encode(offsets),
        )

    def _join_one(self, entry: tuple[bytes, bytes, bytes], offset: int) -> bytes:
        return b'{"tokens":[%b],"token_logprobs":[%b],"top_logprobs":[%b],"text_offset":[%d]}' % (
            *entry,
            offset,
        )


class ChatScores(ScoreWriter):
    """Writes a `ChatLogprobs`; an entry is a `TokenLogprob`."""

    _around = b'{"content":[%b],"refusal":null}'
    """What the entries are in."""
    _no_bytes = b"null"
    """The bytes of a token that has none."""

    def __init__(self, text: Text, as_ids: bool) -> None:
        super().__init__(text, as_ids)
        self._end = _Remembered(self._behind)

    def _before(self, token: int) -> bytes:
        return b'{"token":%b,"logprob":' % msgspec.json.encode(self.name(token))

    def _behind(self, token: int) -> bytes:
        piece = list(self._text.pieces(token.to_bytes(4, "little"))[0])
        return b',"bytes":%b}' % (msgspec.json.encode(piece) if piece else self._no_bytes)

    def _entries(self, scored: Columns, num_top: int) -> list[bytes]:
        token_ids, logprobs, top_ids, top_logprobs = scored
        begin, end, width = self._begin, self._end, _width(scored)
        numbers, top_numbers = encode_numbers(logprobs), encode_numbers(top_logprobs)
        entries = []
        for place, (token, number) in enumerate(zip(token_ids, numbers, strict=True)):
            at = slice(place * width, place * width + num_top)
            pairs = zip(top_ids[at], top_numbers[at], strict=True)
            shown = [begin[other] + p + end[other] for other, p in pairs if other != _NOBODY]
            own = begin[token] + number + end[token][:-1]
            entries.append(b'%b,"top_logprobs":[%b]}' % (own, b",".join(shown)))
        return entries

    def _join(self, entries: Sequence[bytes], _offsets: Sequence[int]) -> bytes:
        return self._around % b",".join(entries)

    def _join_one(self, entry: bytes, _offset: int) -> bytes:
        return self._around % entry


class TokenIdScores(ChatScores):
    """Writes a `TokenIdLogprobs`."""

    _around = b'{"content":[%b]}'

    def _before(self, token: int) -> bytes:
        return b'{"token":"token_id:%d","token_id":%d,"logprob":' % (token, token)

    def _behind(self, _token: int) -> bytes:
        return b"}"


@lru_cache(maxsize=8)
def scores_of(kind: type[ScoreWriter], text: Text, as_ids: bool) -> ScoreWriter:
    """Return the one that all requests of a model share."""
    return kind(text, as_ids)


def render_prompt(
    num_unscored: int, scored: Output, num_top: int, name: Name, is_ranked: bool = True
) -> Raw:
    """Return a prompt's scores: null for its first tokens, then objects by token id. The ranks of
    others than its own are known if they are the likeliest."""
    token_ids, logprobs, top_ids, top_logprobs = columns = _unpack(scored)
    numbers, top_numbers = (
        [max(value, LOWEST) for value in values] for values in (logprobs, top_logprobs)
    )
    width = _width(columns)
    entries: list[dict[str, PromptLogprob] | None] = [None] * num_unscored
    for place, (token, number, rank) in enumerate(
        zip(token_ids, numbers, array("i", scored.ranks), strict=True)
    ):
        shown, own = slice(place * width, place * width + min(width, num_top)), {token: rank}
        pairs = enumerate(zip(top_ids[shown], top_numbers[shown], strict=True), 1)
        entry = {
            str(other): PromptLogprob(p, i if is_ranked else own.get(other), name(other))
            for i, (other, p) in pairs
            if other >= 0
        }
        entry.setdefault(str(token), PromptLogprob(number, rank, name(token)))
        entries.append(entry)
    return Raw(msgspec.json.encode(entries))
