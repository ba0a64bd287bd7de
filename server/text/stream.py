"""TextStream: one completion as text, while its tokens arrive.

Whatever the cuts between deliveries, the pieces joined are the text of the whole. Bytes that may
still become a character, or the beginning of a stop string, are held back until they are decided.
"""

from __future__ import annotations

import codecs
import re
from array import array
from itertools import accumulate
from sys import getsizeof

import numpy as np

from srm.memory import Cache
from srm.server import metrics

_WIDTH = 16
"""Bytes of a row. Runs with a longer token are joined as Python bytes."""
_FILL = b"\xff"
_ELSEWHERE = b"\xfe"
"""First byte of a row that does not hold its token. Neither byte is ever part of UTF-8, so besides
long tokens only those with such a byte are not in their rows."""
BROKEN = -1
_LONG = 1024
"""Bytes of a pattern that is not to be kept."""
_FEW = 64
"""Fewest tokens for which the gather is faster."""


class ByteTable:
    """The bytes of every token id, from 0 on, read in the way that is fastest for the length.

    A short run of tokens is a join of Python bytes. A long one is a gather of rows of equal width
    and one pass that drops what fills them: no Python object is made per token.
    """

    def __init__(self, entries: list[bytes]) -> None:
        self.entries = entries
        self.num_characters = [_num_characters(entry) for entry in entries]
        """Characters of each token; BROKEN if it begins or ends inside one."""
        rows = b"".join(map(_row, entries))
        self._rows = np.frombuffer(rows, np.dtype((np.void, _WIDTH)))

    def join(self, token_ids: bytes) -> bytes:
        """The bytes of int32 little-endian token ids, one after the other."""
        if len(token_ids) >= 4 * _FEW:
            rows = self._rows.take(np.frombuffer(token_ids, np.int32)).tobytes()
            if _ELSEWHERE not in rows:
                return rows.translate(None, _FILL)
        return b"".join(map(self.entries.__getitem__, array("i", token_ids)))

    def pieces(self, token_ids: bytes) -> list[bytes]:
        """The bytes of each token."""
        return [*map(self.entries.__getitem__, array("i", token_ids))]


def _num_characters(entry: bytes) -> int:
    try:
        return len(entry.decode())
    except UnicodeDecodeError:
        return BROKEN


def _row(entry: bytes) -> bytes:
    is_here = len(entry) <= _WIDTH and _FILL not in entry and _ELSEWHERE not in entry
    return (entry if is_here else _ELSEWHERE).ljust(_WIDTH, _FILL)


_Utf8 = codecs.getincrementaldecoder("utf-8")

UNKNOWN, CLEAN, NEAR = range(3)
"""Kinds of tokens. No stop string begins in a CLEAN one or is complete there, unless it had begun
before."""


_kinds = Cache[tuple["ByteTable", tuple[bytes, ...]], bytearray](
    16 * 1024 * 1024, metrics.CACHE_BYTES.labels("stop strings").set
)


def _kinds_of(table: ByteTable, stops: tuple[bytes, ...]) -> bytearray:
    """Return the kinds of tokens beside these stop strings, which all who look for them learn."""
    if (known := _kinds.get((table, stops))) is None:
        known = bytearray(len(table.entries))
        _kinds.put((table, stops), known, len(known) + sum(map(getsizeof, stops)))
    return known


class StopStrings:
    """Finds where a completion's bytes reach one of the given strings, or may be about to."""

    def __init__(self, stops: list[str], table: ByteTable) -> None:
        """`stops` has at least one string, none empty."""
        self._all = tuple(stop.encode() for stop in stops)
        self._any = re.compile(b"|".join(map(re.escape, self._all)))
        if len(self._any.pattern) > _LONG:
            re.purge()  # it would keep the last 512 patterns, of whatever size
        self._beginnings = {stop[:size] for stop in self._all for size in range(1, len(stop))}
        self._longest_beginning = max(map(len, self._all)) - 1
        self._table = table
        self.kinds = _kinds_of(table, self._all)
        """By token; UNKNOWN until `learn`."""

    def learn(self, token: int) -> None:
        """Find out of which kind a token is."""
        data = self._table.entries[token]
        is_near = self.search(data) is not None or self.count_undecided(data) > 0
        self.kinds[token] = NEAR if is_near else CLEAN

    def completes(self, held: bytes, token: int) -> bool:
        """Whether a stop string is complete with this token, behind a beginning that is held."""
        if self.kinds[token] == UNKNOWN:
            self.learn(token)
        is_clean = not held and self.kinds[token] == CLEAN
        return not is_clean and self.search(held + self._table.entries[token]) is not None

    def search(self, data: bytes) -> tuple[int, int] | None:
        """Return begin and end of the stop string that is complete first; of several, the longest
        one's."""
        if not self._any.search(data):
            return None
        matches = ((data.find(stop), len(stop)) for stop in self._all)
        end, begin = min((begin + size, begin) for begin, size in matches if begin >= 0)
        return begin, end

    def count_undecided(self, data: bytes) -> int:
        """Return how many of the last bytes may be the beginning of a stop string."""
        for length in range(min(self._longest_beginning, len(data)), 0, -1):
            if data[-length:] in self._beginnings:
                return length
        return 0


class TextStream:
    """One completion. Nothing may be fed once `stop_string` is set, or after `flush`."""

    __slots__ = (
        "_decoder",
        "_keeps_stop",
        "_offset_decoder",
        "_stops",
        "_table",
        "held",
        "is_pending",
        "num_characters",
        "stop_string",
    )

    def __init__(
        self, table: ByteTable, stops: StopStrings | None = None, keeps_stop: bool = False
    ) -> None:
        """`keeps_stop`: the stop string that ends it is text too."""
        self._table = table
        self._stops = stops
        self._keeps_stop = keeps_stop
        self._decoder = _Utf8("replace")
        self._offset_decoder: codecs.IncrementalDecoder | None = None
        self.held = b""
        """The beginning of a stop string, perhaps."""
        self.is_pending = False
        """Whether bytes are held back."""
        self.num_characters = 0
        """Complete ones before the next token, as far as `offsets` counted."""
        self.stop_string: str | None = None
        """The stop string that was reached."""

    def feed(self, token_ids: bytes) -> tuple[str, int]:
        """Take tokens, int32 little-endian; return the text that is decided now, and how many of
        the tokens it takes: all, unless a stop string was reached before the last."""
        num_held = len(self.held)
        text, end = self._advance(self.held + self._table.join(token_ids))
        count = len(token_ids) // 4
        return text, count if end is None else self._count_to(end - num_held, token_ids)

    def feed_token(self, token: int) -> str:
        """Take one token; return the text that is decided now."""
        return self._advance(self.held + self._table.entries[token])[0]

    def _advance(self, data: bytes) -> tuple[str, int | None]:
        """Return the text of these bytes that is decided, and where a stop string ends in them."""
        if self._stops is None:
            text = self._decoder.decode(data)
            self.is_pending = bool(self._decoder.getstate()[0])
            return text, None
        if match := self._stops.search(data):
            begin, end = match
            self.held, self.stop_string = b"", data[begin:end].decode()
            return self._decoder.decode(data[: end if self._keeps_stop else begin], True), end
        decided = len(data) - self._stops.count_undecided(data)
        text, self.held = self._decoder.decode(data[:decided]), data[decided:]
        self.is_pending = bool(self.held or self._decoder.getstate()[0])
        return text, None

    def echo(self, token_ids: bytes) -> str:
        """Take tokens in which no stop string is looked for."""
        return self._decoder.decode(self._table.join(token_ids))

    def flush(self) -> str:
        """Return the text that was held back: nothing comes behind it."""
        self.is_pending, held = False, self.held
        return self._decoder.decode(held, True)

    def offsets(self, token_ids: bytes) -> list[int]:
        """Return how many characters of the text are complete before each token; to be asked of
        every token, in order."""
        sizes = self._table.num_characters
        counts = [sizes[token] for token in array("i", token_ids)]
        if BROKEN in counts or (self._offset_decoder and self._offset_decoder.getstate()[0]):
            decoder = self._offset_decoder = self._offset_decoder or _Utf8("replace")
            counts = [len(decoder.decode(piece)) for piece in self._table.pieces(token_ids)]
        offsets = list(accumulate(counts, initial=self.num_characters))
        self.num_characters = offsets.pop()
        return offsets

    def _count_to(self, num_bytes: int, token_ids: bytes) -> int:
        """Return how many of the tokens it takes to have `num_bytes` bytes."""
        sizes = accumulate(map(len, self._table.pieces(token_ids)))
        return next(count for count, size in enumerate(sizes, 1) if size >= num_bytes)
