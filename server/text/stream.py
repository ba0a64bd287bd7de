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
import numpy.typing as npt

from srm.engine.messages import REASONS
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

_STOP = REASONS.index("stop")
_ENDS_IN_TEXT = (0, REASONS.index("length"))
"""Reasons of tokens that are text in any case; 0 is none."""
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


class StopFinder:
    """Finds stop strings in the completions of one request as their tokens come, so that slots come
    free whether or not somebody takes the text.

    Only tokens with a stop string or the beginning of one in them, which is known by token, and
    those behind such a beginning are searched. Keeps no text but such beginnings.
    """

    def __init__(
        self, stops: list[str], table: ByteTable, num_samples: int, keeps_stop: bool
    ) -> None:
        """`stops` has at least one string, none empty; `keeps_stop`: what ends a completion is text
        too."""
        self._all = tuple(stop.encode() for stop in stops)
        self._any = re.compile(b"|".join(map(re.escape, self._all)))
        if len(self._any.pattern) > _LONG:
            re.purge()  # it would keep the last 512 patterns, of whatever size
        self._beginnings = {stop[:size] for stop in self._all for size in range(1, len(stop))}
        self._longest_beginning = max(map(len, self._all)) - 1
        self._table = table
        self._keeps_stop = keeps_stop
        self.kinds = _kinds_of(table, self._all)
        """By token; UNKNOWN until a completion has it."""
        self._kinds = np.frombuffer(self.kinds, np.uint8)
        self._has_begun = np.zeros(num_samples, np.bool_)
        self._begun: dict[int, bytes] = {}  # beginnings of stop strings that texts end in
        self.ends: dict[int, tuple[str, int]] = {}
        """By completion: the stop string that ends it, and how many of its last bytes are cut."""

    def find(
        self,
        indices: npt.NDArray[np.int64],
        token_ids: npt.NDArray[np.int32],
        reasons: npt.NDArray[np.uint8],
    ) -> list[int]:
        """Take one more token each of completions; return the places of those that reach a stop
        string. The engine's `reasons` end some of them too."""
        kinds = self._kinds[token_ids]
        is_near = (kinds != CLEAN) | self._has_begun[indices]
        places = np.flatnonzero(is_near)
        new = (column[places].tolist() for column in (indices, token_ids, reasons))
        rows = zip(places.tolist(), *new, strict=True)
        return [place for place, *arguments in rows if self.add(*arguments)]

    def add(self, index: int, token: int, reason: int = 0) -> bool:
        """Take one more token of a completion, and the engine's reason if it ends; return whether a
        stop string is complete."""
        if index in self.ends:
            return True
        if reason not in _ENDS_IN_TEXT and not (reason == _STOP and self._keeps_stop):
            return False
        if self.kinds[token] == UNKNOWN:
            self._learn(token)
        data = self._begun.get(index, b"") + self._table.entries[token]
        if match := self._search(data):
            begin, end = match
            num_cut = len(data) - (end if self._keeps_stop else begin)
            self.ends[index] = data[begin:end].decode(), num_cut
            return True
        undecided = self.count_undecided(data)
        self._has_begun[index] = undecided > 0
        self._begun[index] = data[len(data) - undecided :]
        return False

    def are_clean(self, token_ids: list[int]) -> bool:
        """Whether none of these tokens needs to be added, behind one that left nothing begun."""
        kinds = self.kinds
        if len(token_ids) == 1:
            return kinds[token_ids[0]] == CLEAN
        return all(kinds[token] == CLEAN for token in token_ids)

    def add_all(self, index: int, token_ids: list[int]) -> int:
        """Take more tokens of a completion; return how many of them there are up to the one that
        completes a stop string; 0: none does."""
        return next((n for n, token in enumerate(token_ids, 1) if self.add(index, token)), 0)

    def count_undecided(self, data: bytes) -> int:
        """Return how many of the last bytes may be the beginning of a stop string."""
        for length in range(min(self._longest_beginning, len(data)), 0, -1):
            if data[-length:] in self._beginnings:
                return length
        return 0

    def _learn(self, token: int) -> None:
        """Find out of which kind a token is."""
        data = self._table.entries[token]
        is_near = self._search(data) is not None or self.count_undecided(data) > 0
        self.kinds[token] = NEAR if is_near else CLEAN

    def _search(self, data: bytes) -> tuple[int, int] | None:
        """Return begin and end of the stop string that is complete first; of several, the longest
        one's."""
        if not self._any.search(data):
            return None
        matches = ((data.find(stop), len(stop)) for stop in self._all)
        end, begin = min((begin + size, begin) for begin, size in matches if begin >= 0)
        return begin, end


class TextStream:
    """One completion. Nothing may be added after `finish`."""

    __slots__ = (
        "_decoder",
        "_finder",
        "_held",
        "_offset_decoder",
        "_table",
        "is_pending",
        "num_characters",
    )

    def __init__(self, table: ByteTable, finder: StopFinder | None = None) -> None:
        """`finder` has found no stop string in what is added."""
        self._table = table
        self._finder = finder
        self._decoder = _Utf8("replace")
        self._offset_decoder: codecs.IncrementalDecoder | None = None
        self._held = b""  # perhaps the beginning of a stop string
        self.is_pending = False
        """Whether bytes are held back."""
        self.num_characters = 0
        """Complete ones before the next token, as far as `offsets` counted."""

    def add(self, token_ids: bytes) -> str:
        """Take tokens, int32 little-endian; return the text that is decided now."""
        return self._advance(self._table.join(token_ids))

    def add_few(self, token_ids: list[int]) -> str:
        """Take tokens, which `add` does faster for many; return the text that is decided now."""
        return self._advance(b"".join(map(self._table.entries.__getitem__, token_ids)))

    def finish(self, token_ids: bytes, num_cut: int = 0) -> str:
        """Take the last tokens; return the rest of the text, without its last `num_cut` bytes."""
        self.is_pending = False
        data = self._held + self._table.join(token_ids)
        return self._decoder.decode(data[: len(data) - num_cut], True)

    def _advance(self, data: bytes) -> str:
        if self._finder is not None:
            data = self._held + data
            decided = len(data) - self._finder.count_undecided(data)
            data, self._held = data[:decided], data[decided:]
        text = self._decoder.decode(data)
        self.is_pending = bool(self._held or self._decoder.getstate()[0])
        return text

    def echo(self, token_ids: bytes) -> str:
        """Take tokens in which no stop string is looked for."""
        return self._decoder.decode(self._table.join(token_ids))

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
