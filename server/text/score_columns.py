"""Scores as JSON, of one token each of many completions: straight from arrays, without objects.

What `server.text.logprobs` and chats say of the same token, byte for byte; where a row needs more
than a look-up for each token, None is returned instead.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable
from functools import lru_cache

import msgspec
import numpy as np
import numpy.typing as npt

from server.text.logprobs import LOWEST, naming
from server.text.text import Text

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]


class _Remembered(dict[int, bytes]):
    """The bytes of each token, made when they are first asked for."""

    def __init__(self, make: Callable[[int], bytes]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, token: int) -> bytes:
        made = self[token] = self._make(token)
        return made


class ScoreColumns(ABC):
    """Renders the scores of one kind of reply."""

    def __init__(self, text: Text, as_ids: bool) -> None:
        self._text = text
        self._name = naming(text, as_ids)
        self._begin = _Remembered(self._before)
        self._is_shared = np.zeros(text.model.vocab_size, np.bool_)
        """By token: whether another one has its name."""
        if not as_ids:
            counts = Counter(text.labels)
            self._is_shared[:] = [counts[label] > 1 for label in text.labels]

    def render(
        self, tokens: I32, logprobs: F32, top_ids: I32, top_logprobs: F32, offsets: Iterable[int]
    ) -> list[bytes | None]:
        """Return the scores of each token, whose likeliest alternatives are its row of `top_ids`
        and which has `offsets` characters before it; None where a look-up is not enough."""
        is_odd = self._is_shared[tokens] | (top_ids < 0).any(1) | self._is_shared[top_ids].any(1)
        values = np.maximum(np.column_stack([logprobs, top_logprobs]), np.float32(LOWEST))
        numbers = msgspec.json.encode(values.ravel().tolist())[1:-1].split(b",")
        width = values.shape[1]
        rows = zip(
            *(tokens.tolist(), top_ids.tolist(), offsets, is_odd.tolist()),
            range(0, len(numbers), width),
            strict=True,
        )
        return [
            None
            if odd
            else self._row(token, numbers[at], ids, numbers[at + 1 : at + width], offset)
            for token, ids, offset, odd, at in rows
        ]

    @abstractmethod
    def _row(
        self, token: int, logprob: bytes, top_ids: list[int], top_logprobs: list[bytes], offset: int
    ) -> bytes:
        """Return the scores of one token."""

    @abstractmethod
    def _before(self, token: int) -> bytes:
        """Return what is said of a token before its log-probability."""


class CompletionScores(ScoreColumns):
    """Renders a `Logprobs`."""

    def _row(
        self, token: int, logprob: bytes, top_ids: list[int], top_logprobs: list[bytes], offset: int
    ) -> bytes:
        begin = self._begin
        own = begin[token]
        shown = [begin[one] + p for one, p in zip(top_ids, top_logprobs, strict=True)]
        if token not in top_ids:
            shown.append(own + logprob)
        return b'{"tokens":[%b],"token_logprobs":[%b],"top_logprobs":[{%b}],"text_offset":[%d]}' % (
            *(own[:-1], logprob, b",".join(shown)),
            offset,
        )

    def _before(self, token: int) -> bytes:
        return msgspec.json.encode(self._name(token)) + b":"


class ChatScores(ScoreColumns):
    """Renders a `ChatLogprobs`."""

    def __init__(self, text: Text, as_ids: bool) -> None:
        super().__init__(text, as_ids)
        self._end = _Remembered(self._behind)

    def _row(
        self,
        token: int,
        logprob: bytes,
        top_ids: list[int],
        top_logprobs: list[bytes],
        _offset: int,
    ) -> bytes:
        begin, end = self._begin, self._end
        shown = [begin[one] + p + end[one] for one, p in zip(top_ids, top_logprobs, strict=True)]
        own = begin[token] + logprob + end[token][:-1]
        return b'{"content":[%b,"top_logprobs":[%b]}],"refusal":null}' % (own, b",".join(shown))

    def _before(self, token: int) -> bytes:
        return b'{"token":%b,"logprob":' % msgspec.json.encode(self._name(token))

    def _behind(self, token: int) -> bytes:
        piece = list(self._text.pieces(token.to_bytes(4, "little"))[0]) or None
        return b',"bytes":%b}' % msgspec.json.encode(piece)


@lru_cache(maxsize=8)
def score_columns(kind: type[ScoreColumns], text: Text, as_ids: bool) -> ScoreColumns:
    """Return the one that all requests of a model share."""
    return kind(text, as_ids)
