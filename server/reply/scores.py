"""Log-probabilities as JSON, of any number of tokens: the one place that writes them.

Numbers are the engine's float32 and the same wherever a token appears; only minus infinity, which
JSON does not have, becomes LOWEST. What is written of a token apart from numbers is made once for
each model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, Protocol

import msgspec
from msgspec import Raw

from server.schema.completion_response import PromptLogprob
from server.text.text import Text

LOWEST = -9999.0
_NOBODY = -1
"""Fills the place of a token where the vocabulary has no more."""

Name = Callable[[int], str]


class Scored(Protocol):
    """Tokens with their scores, little-endian: ints and float32; of alternatives equally many for
    each token, the likeliest first."""

    @property
    def token_ids(self) -> bytes: ...

    @property
    def logprobs(self) -> bytes: ...

    @property
    def top_ids(self) -> bytes: ...

    @property
    def top_logprobs(self) -> bytes: ...


def naming(text: Text, as_ids: bool) -> Name:
    """Return how tokens are written: as their text, or as `token_id:17`."""
    return _id_name if as_ids else text.labels.__getitem__


def _id_name(token: int) -> str:
    return f"token_id:{token}"


def encode_numbers(values: list[float]) -> list[bytes]:
    """Return the numbers as JSON."""
    if values and min(values) < LOWEST:
        values = [max(value, LOWEST) for value in values]
    return msgspec.json.encode(values)[1:-1].split(b",") if values else []


class _Remembered(dict[int, bytes]):
    """The bytes of each token, made when they are first asked for."""

    def __init__(self, make: Callable[[int], bytes]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, token: int) -> bytes:
        made = self[token] = self._make(token)
        return made


class Scores(ABC):
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
        self, scored: Scored, num_top: int, offsets: list[int], before: Sequence[Any] = ()
    ) -> Raw:
        """Return the scores of a choice's tokens and of `num_top` likeliest ones in the place of
        each, after the entries `before` them. `offsets` are characters before each token."""
        return Raw(self._join([*before, *self.entries(scored, num_top)], offsets))

    def entries(self, scored: Scored, num_top: int) -> list[Any]:
        """Return the entry of each token."""
        token_ids, top_ids = array("i", scored.token_ids), array("i", scored.top_ids)
        logprobs, top_logprobs = array("f", scored.logprobs), array("f", scored.top_logprobs)
        width = len(top_ids) // max(len(token_ids), 1)  # of each token, at least `num_top`
        return self._entries(token_ids, logprobs, top_ids, top_logprobs, width, num_top)

    def render_each(
        self,
        token_ids: list[int],
        logprobs: list[float],
        top_ids: list[int],
        top_logprobs: list[float],
        offsets: Iterable[int],
    ) -> list[bytes]:
        """Return the scores of one token each of many choices, which ask for as many likeliest
        ones; those of all are one list."""
        width = len(top_ids) // max(len(token_ids), 1)
        entries = self._entries(token_ids, logprobs, top_ids, top_logprobs, width, width)
        join = self._join
        return [join((entry,), (at,)) for entry, at in zip(entries, offsets, strict=True)]

    def _entries(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        top_ids: Sequence[int],
        top_logprobs: Sequence[float],
        width: int,
        num_top: int,
    ) -> list[Any]:
        num_top = min(num_top, width)
        numbers, top_numbers = encode_numbers([*logprobs]), encode_numbers([*top_logprobs])
        entries = []
        for place, (token, number) in enumerate(zip(token_ids, numbers, strict=True)):
            shown = slice(place * width, place * width + num_top)
            entries.append(self._entry(token, number, top_ids[shown], top_numbers[shown]))
        return entries

    @abstractmethod
    def _before(self, token: int) -> bytes:
        """Return what stands before a token's number."""

    @abstractmethod
    def _entry(
        self, token: int, number: bytes, top_ids: Sequence[int], top_numbers: list[bytes]
    ) -> Any:
        """Return the entry of a token; of the likeliest ones _NOBODY may be the last."""

    @abstractmethod
    def _join(self, entries: Sequence[Any], offsets: Sequence[int]) -> bytes:
        """Return entries as what a choice has."""


class CompletionScores(Scores):
    """Writes a `Logprobs`; an entry is a token's name, its number and the likeliest ones."""

    first_entry = b"null", b"null"
    """Number and likeliest ones of a prompt's first token, which nothing comes before."""

    def _before(self, token: int) -> bytes:
        return msgspec.json.encode(self.name(token)) + b":"

    def _entry(
        self, token: int, number: bytes, top_ids: Sequence[int], top_numbers: list[bytes]
    ) -> tuple[bytes, bytes, bytes]:
        begin = self._begin
        own = begin[token]
        if not top_numbers:
            return own[:-1], number, b"{%b%b}" % (own, number)
        if token not in top_ids:
            top_ids, top_numbers = [*top_ids, token], [*top_numbers, number]
        if any(map(self._is_shared.__getitem__, top_ids)) or _NOBODY in top_ids:
            return own[:-1], number, self._by_name(top_ids, top_numbers)
        shown = [begin[other] + p for other, p in zip(top_ids, top_numbers, strict=True)]
        return own[:-1], number, b"{%b}" % b",".join(shown)

    def _by_name(self, top_ids: Sequence[int], numbers: list[bytes]) -> bytes:
        """Return the tokens by name; of two with one name, the second by id."""
        found: dict[str, Raw] = {}
        for token, number in zip(top_ids, numbers, strict=True):
            if token != _NOBODY:
                label = self.name(token)
                found[_id_name(token) if label in found else label] = Raw(number)
        return msgspec.json.encode(found)

    def entries_of_prompt(self, first: int, rest: Scored, num_top: int) -> list[Any]:
        """Return the entries of a prompt: its first token, and the others with their scores."""
        return [(self._begin[first][:-1], b"null", b"null"), *self.entries(rest, num_top)]

    def _join(self, entries: Sequence[tuple[bytes, bytes, bytes]], offsets: Sequence[int]) -> bytes:
        names, numbers, tops = zip(*entries, strict=True) if entries else ((), (), ())
        return b'{"tokens":[%b],"token_logprobs":[%b],"top_logprobs":[%b],"text_offset":[%b]}' % (
            *(b",".join(names), b",".join(numbers), b",".join(tops)),
            b",".join([b"%d" % offset for offset in offsets]),
        )


class ChatScores(Scores):
    """Writes a `ChatLogprobs`; an entry is a `TokenLogprob`."""

    def __init__(self, text: Text, as_ids: bool) -> None:
        super().__init__(text, as_ids)
        self._end = _Remembered(self._behind)

    def _before(self, token: int) -> bytes:
        return b'{"token":%b,"logprob":' % msgspec.json.encode(self.name(token))

    def _behind(self, token: int) -> bytes:
        piece = list(self._text.pieces(token.to_bytes(4, "little"))[0]) or None
        return b',"bytes":%b}' % msgspec.json.encode(piece)

    def _entry(
        self, token: int, number: bytes, top_ids: Sequence[int], top_numbers: list[bytes]
    ) -> bytes:
        begin, end = self._begin, self._end
        pairs = zip(top_ids, top_numbers, strict=True)
        shown = [begin[other] + p + end[other] for other, p in pairs if other != _NOBODY]
        own = begin[token] + number + end[token][:-1]
        return b'%b,"top_logprobs":[%b]}' % (own, b",".join(shown))

    def _join(self, entries: Sequence[bytes], _offsets: Sequence[int]) -> bytes:
        return b'{"content":[%b],"refusal":null}' % b",".join(entries)


@lru_cache(maxsize=8)
def scores_of(kind: type[Scores], text: Text, as_ids: bool) -> Scores:
    """Return the one that all requests of a model share."""
    return kind(text, as_ids)


def render_prompt(ranks: bytes, scored: Scored, num_top: int, name: Name) -> Raw:
    """Return a prompt's scores: null for its first token, then objects by token id."""
    token_ids, top_ids = array("i", scored.token_ids), array("i", scored.top_ids)
    numbers = [max(value, LOWEST) for value in array("f", scored.logprobs)]
    top_numbers = [max(value, LOWEST) for value in array("f", scored.top_logprobs)]
    width = len(top_ids) // max(len(token_ids), 1)
    entries: list[dict[str, PromptLogprob] | None] = [None]
    for place, (token, number, rank) in enumerate(
        zip(token_ids, numbers, array("i", ranks), strict=True)
    ):
        shown = slice(place * width, place * width + min(width, num_top))
        pairs = enumerate(zip(top_ids[shown], top_numbers[shown], strict=True), 1)
        entry = {
            str(other): PromptLogprob(p, i, name(other)) for i, (other, p) in pairs if other >= 0
        }
        entry.setdefault(str(token), PromptLogprob(number, rank, name(token)))
        entries.append(entry)
    return Raw(msgspec.json.encode(entries))
