"""TokenTable: what completions have new, in one API process, from when it arrives until it is read.

Every completion that is open has a row. A step's news are appended to all rows at once, as arrays;
whoever reads a row takes what has been added since the last time, so a slow reader is only a cursor
that stands still: its tokens wait, each once, and nobody else's do. Knows no requests and no text.
"""

from __future__ import annotations

import numpy as np

from engine.batch import F32, I32, I64, Bool
from engine.news import U8, News
from engine.token_queues import NO_LOGPROBS, NO_TOKENS, TokenQueues

ROW_BITS = 24
"""Of a stream number: the row it stands for. The bits above tell a row's users apart."""
SERIALS = 2**16
"""A row's users are told apart unless so many others have come between."""
CLOSED = -1
"""In place of a stream number: nobody's row."""
NOBODY = -1


class TokenTable:
    """Rows of tokens: appended by the step, read and forgotten by the reader."""

    def __init__(self) -> None:
        self._queues = TokenQueues()
        self._serial = 0
        self._top = 0  # rows ever given out
        self._unused: dict[int, list[int]] = {}  # first rows, by the size of their stretch
        # By row.
        self._stream = np.full(0, CLOSED, np.int64)
        self._reader = np.zeros(0, np.int64)  # whom to tell of news
        self._reason = np.zeros(0, np.uint8)
        self._is_told = np.zeros(0, np.bool_)  # its end has been read

    @property
    def num_pages(self) -> int:
        """Pages of memory that hold tokens nobody has read, or have room for the next ones."""
        return self._queues.num_pages

    def open(self, size: int, reader: int) -> int:
        """A stretch of `size` rows for a reader; the stream number of the first of them."""
        stretches = self._unused.get(_space(size))
        if stretches:
            row = stretches.pop()
        else:
            row, self._top = self._top, self._top + _space(size)
            assert self._top <= 1 << ROW_BITS, "more completions at once than stream numbers"
            self._grow()
        self._serial = (self._serial + 1) % SERIALS
        first = (self._serial << ROW_BITS) + row
        rows = slice(row, row + size)
        self._stream[rows] = np.arange(first, first + size)
        self._reader[rows] = reader
        self._reason[rows] = 0
        self._is_told[rows] = False
        return first

    def close(self, first: int, size: int) -> None:
        """Give the stretch back, and whatever of it was not read."""
        row = _row(first)
        self._stream[row : row + size] = CLOSED
        self._queues.forget(np.arange(row, row + size))
        self._unused.setdefault(_space(size), []).append(row)

    def put(self, streams: I64, tokens: I32, logprobs: F32, reasons: U8) -> I64:
        """Append a step's rows, of which each names another stream; the readers that have news.

        What is of streams that are closed or ended is dropped. Readers may be named twice.
        """
        rows = streams & ((1 << ROW_BITS) - 1)
        assert not len(rows) or rows.max() < self._top, "rows of somebody else"
        is_open = (self._stream[rows] == streams) & (self._reason[rows] == 0)
        if not is_open.all():
            rows, tokens, reasons = rows[is_open], tokens[is_open], reasons[is_open]
            logprobs = logprobs[is_open] if len(logprobs) else logprobs
        self._reason[rows] = reasons
        said, speakers = np.flatnonzero(tokens >= 0), rows
        if len(said) < len(rows):
            speakers, tokens = rows[said], tokens[said]
            logprobs = logprobs[said] if len(logprobs) else logprobs
        self._queues.append(speakers, tokens, logprobs)
        readers: I64 = self._reader[rows]
        return readers

    def take(self, first: int, size: int, only_ended: bool = False) -> News:
        """What a stretch has new since the last time; `only_ended`: leave what is of completions
        that have not ended."""
        row = _row(first)
        if size == 1 and not only_ended:
            return self._take_one(row)
        stretch = slice(row, row + size)
        has_ended = (self._reason[stretch] != 0) & ~self._is_told[stretch]
        if not only_ended:
            has_ended |= self._queues.count[stretch] > 0
        indices = np.flatnonzero(has_ended)
        rows = indices + row
        reasons = self._reason[rows]
        self._is_told[rows] = reasons != 0
        return News(indices, *self._queues.read(rows), reasons)

    def _take_one(self, row: int) -> News:
        """`take` of a single row, which is what most readers have."""
        reason = int(self._reason[row])
        if not self._queues.count[row] and (not reason or self._is_told[row]):
            return NO_NEWS
        self._is_told[row] = reason != 0
        tokens, logprobs = self._queues.read_one(row)
        offsets = np.array([0, len(tokens)])
        return News(ONE_INDEX, offsets, tokens, logprobs, np.array([reason], np.uint8))

    def reader(self, stream: int) -> int:
        """Whose a stream is; NOBODY if it is closed."""
        row = _row(stream)
        is_open = row < self._top and self._stream[row] == stream
        return int(self._reader[row]) if is_open else NOBODY

    def mute(self, first: int, indices: I64) -> int:
        """End completions of which nothing more is to be read, nor that they have ended. The number
        of their tokens that nobody has read."""
        rows = _row(first) + indices
        self._reason[rows] = 1
        self._is_told[rows] = True
        unread = int(self._queues.count[rows].sum())
        self._queues.forget(rows)
        return unread

    def told(self, first: int, size: int) -> Bool:
        """bool[size]: whether the end of each completion of a stretch has been read."""
        row = _row(first)
        return self._is_told[row : row + size]

    def has_ended(self, first: int, index: int) -> bool:
        """Whether a completion has, be it read or not."""
        return bool(self._reason[_row(first) + index])

    def ended(self, first: int, size: int) -> Bool:
        """bool[size]: `has_ended` of a stretch."""
        row = _row(first)
        is_ended: Bool = self._reason[row : row + size] != 0
        return is_ended

    def _grow(self) -> None:
        size = len(self._stream)
        if self._top <= size:
            return
        more = max(self._top - size, size)
        self._queues.add_rows(more)
        self._stream = np.append(self._stream, np.full(more, CLOSED))
        self._reader = np.append(self._reader, np.zeros(more, np.int64))
        self._reason = np.append(self._reason, np.zeros(more, np.uint8))
        self._is_told = np.append(self._is_told, np.zeros(more, np.bool_))


ONE_INDEX: I64 = np.zeros(1, np.int64)
NO_NEWS = News(ONE_INDEX[:0], ONE_INDEX, NO_TOKENS, NO_LOGPROBS, np.empty(0, np.uint8))


def _row(stream: int) -> int:
    return stream & ((1 << ROW_BITS) - 1)


def _space(size: int) -> int:
    """Rows that a stretch takes, so that others of about its size can have it later."""
    return 1 << (size - 1).bit_length()
