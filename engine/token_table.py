"""TokenTable: what completions have new, in one API process, from when it arrives until it is read.

Every completion that is open has a row. A step's news are appended to all rows at once, as arrays;
whoever reads a row takes what has been added since the last time, so a slow reader is only a cursor
that stands still: its tokens wait, each once, and nobody else's do. Tokens lie in pages of a common
arena that go back when they are read. Knows no requests and no text.
"""

from __future__ import annotations

import numpy as np

from engine.batch import F32, I32, I64, Bool
from engine.news import U8, News

PAGE = 16
"""Tokens of a page: a cache line."""
ROW_BITS = 24
"""Of a stream number: the row it stands for. The bits above tell a row's users apart."""
SERIALS = 2**16
"""A row's users are told apart unless so many others have come between."""
CLOSED = -1
"""In place of a stream number: nobody's row."""
NO_PAGE = -1
NOBODY = -1


class TokenTable:
    """Rows of tokens: appended by the step, read and forgotten by the reader."""

    def __init__(self) -> None:
        self._serial = 0
        self._top = 0  # rows ever given out
        self._unused: dict[int, list[int]] = {}  # first rows, by the size of their stretch
        # By row.
        self._stream = np.full(0, CLOSED, np.int64)
        self._reader = np.zeros(0, np.int64)  # whom to tell of news
        self._count = np.zeros(0, np.int64)  # tokens not read
        self._reason = np.zeros(0, np.uint8)
        self._is_told = np.zeros(0, np.bool_)  # its end has been read
        self._first = np.zeros(0, np.int64)  # where in the arena the next token to read is
        self._last = np.zeros(0, np.int64)  # the page written to, NO_PAGE if it is full or none
        self._room = np.zeros(0, np.int64)  # places left in it
        # By page.
        self._next = np.zeros(0, np.int64)
        self._free = np.zeros(0, np.int64)  # a stack of pages
        self._num_free = 0
        # By page and place.
        self._tokens = np.zeros(0, np.int32)
        self._logprobs = np.zeros(0, np.float32)
        self._has_logprobs = False

    @property
    def num_pages(self) -> int:
        """Pages that hold, or wait for, tokens nobody has read."""
        return len(self._next) - self._num_free

    def open(self, size: int, reader: int) -> int:
        """A stretch of `size` rows for a reader; the stream number of the first of them."""
        space = 1 << (size - 1).bit_length()
        stretches = self._unused.get(space)
        if stretches:
            row = stretches.pop()
        else:
            row, self._top = self._top, self._top + space
            assert self._top <= 1 << ROW_BITS, "more completions at once than stream numbers"
            self._grow_rows()
        self._serial = (self._serial + 1) % SERIALS
        first = (self._serial << ROW_BITS) + row
        rows = slice(row, row + size)
        self._stream[rows] = np.arange(first, first + size)
        self._reader[rows] = reader
        self._count[rows] = self._reason[rows] = self._room[rows] = 0
        self._is_told[rows] = False
        self._last[rows] = NO_PAGE
        return first

    def close(self, first: int, size: int) -> None:
        """Give the stretch back, and whatever of it was not read."""
        row = _row(first)
        rows = np.arange(row, row + size)
        self._stream[row : row + size] = CLOSED
        self._forget(rows[(self._count[rows] > 0) | (self._last[rows] != NO_PAGE)])
        self._unused.setdefault(1 << (size - 1).bit_length(), []).append(row)

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
        said, spoken = np.flatnonzero(tokens >= 0), rows
        if len(said) < len(rows):
            spoken, tokens = rows[said], tokens[said]
            logprobs = logprobs[said] if len(logprobs) else logprobs
        self._append(spoken, tokens, logprobs)
        readers: I64 = self._reader[rows]
        return readers

    def reader(self, stream: int) -> int:
        """Whose a stream is; NOBODY if it is closed."""
        row = _row(stream)
        is_open = row < self._top and self._stream[row] == stream
        return int(self._reader[row]) if is_open else NOBODY

    def mute(self, first: int, indices: I64) -> None:
        """End completions of which nothing more is to be read, nor that they have ended."""
        rows = _row(first) + indices
        self._reason[rows] = 1
        self._is_told[rows] = True
        self._forget(rows[(self._count[rows] > 0) | (self._last[rows] != NO_PAGE)])

    def has_ended(self, first: int, index: int) -> bool:
        return bool(self._reason[_row(first) + index])

    def is_ended(self, first: int, size: int) -> Bool:
        """bool[size]: which of a stretch have ended, be it read or not."""
        row = _row(first)
        is_ended: Bool = self._reason[row : row + size] != 0
        return is_ended

    def take(self, first: int, size: int) -> News:
        """What a stretch has new since the last time."""
        row = _row(first)
        if size == 1:
            return self._take_one(row)
        stretch = slice(row, row + size)
        ended = (self._reason[stretch] != 0) & ~self._is_told[stretch]
        indices = np.flatnonzero((self._count[stretch] > 0) | ended)
        rows = indices + row
        self._is_told[rows] = self._reason[rows] != 0
        counts = self._count[rows]
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(counts, out=offsets[1:])
        places = self._read(rows, counts, offsets)
        return News(
            indices=indices,
            offsets=offsets,
            token_ids=self._tokens[places],
            logprobs=self._logprobs[places] if self._has_logprobs else NO_LOGPROBS,
            reasons=self._reason[rows],
        )

    def _take_one(self, row: int) -> News:
        """`take` of a single row, which is what most readers have: without arrays of one."""
        count, reason = int(self._count[row]), int(self._reason[row])
        if not count and (not reason or self._is_told[row]):
            return NO_NEWS
        self._is_told[row] = reason != 0
        places = self._read_one(row, count)
        tokens = [self._tokens[part] for part in places]
        logprobs = [self._logprobs[part] for part in places] if self._has_logprobs else []
        return News(
            indices=ONE_INDEX,
            offsets=np.array([0, count]),
            token_ids=tokens[0].copy()
            if len(tokens) == 1
            else np.concatenate(tokens or [NO_TOKENS]),
            logprobs=np.concatenate(logprobs) if logprobs else NO_LOGPROBS,
            reasons=self._reason[row : row + 1].copy(),
        )

    def _read_one(self, row: int, count: int) -> list[slice]:
        """`_read` of a single row."""
        self._count[row] = 0
        place, parts, done = int(self._first[row]), [], []
        while count:
            here = min(PAGE - place % PAGE, count)
            parts.append(slice(place, place + here))
            count -= here
            if place % PAGE + here < PAGE:
                place += here
                continue
            page = place // PAGE
            done.append(page)
            if count:
                place = PAGE * int(self._next[page])
            else:
                self._last[row] = NO_PAGE
        self._first[row] = place
        if done:
            self._release(np.array(done))
        return parts

    def _append(self, rows: I64, tokens: I32, logprobs: F32) -> None:
        full = rows[self._room[rows] == 0]
        if len(full):
            self._add_pages(full)
        room = self._room[rows]
        places = self._last[rows] * PAGE + (PAGE - room)
        self._tokens[places] = tokens
        if len(logprobs):
            if not self._has_logprobs:
                self._has_logprobs = True
                self._logprobs = np.zeros(len(self._tokens), np.float32)
            self._logprobs[places] = logprobs
        self._room[rows] = room - 1
        self._count[rows] += 1

    def _add_pages(self, rows: I64) -> None:
        if self._num_free < len(rows):
            self._grow_pages(len(rows) - self._num_free)
        self._num_free -= len(rows)
        pages = self._free[self._num_free : self._num_free + len(rows)]
        unread = self._count[rows] > 0
        self._next[self._last[rows[unread]]] = pages[unread]
        self._first[rows[~unread]] = pages[~unread] * PAGE
        self._last[rows] = pages
        self._room[rows] = PAGE

    def _read(self, rows: I64, counts: I64, offsets: I64) -> I64:
        """Where the tokens of these rows lie, i64[offsets[-1]]; the rows have none afterwards."""
        places = np.repeat(self._first[rows] - offsets[:-1], counts)
        places += np.arange(len(places))
        left = self._first[rows] % PAGE + counts  # tokens from the start of the first page on
        if not (left < PAGE).all():
            self._follow(rows, counts, offsets, places)
        else:
            self._first[rows] += counts
        self._count[rows] = 0
        return places

    def _follow(self, rows: I64, counts: I64, offsets: I64, places: I64) -> None:
        """Correct places that lie behind the end of a page, page by page; free what was read."""
        at, left, place = np.arange(len(rows)), counts.copy(), self._first[rows]
        start = offsets[:-1].copy()
        while len(at):
            here = np.minimum(PAGE - place % PAGE, left)
            left = left - here
            is_through = (place % PAGE + here == PAGE) & (here > 0)
            pages = place // PAGE
            following = np.where(left > 0, self._next[pages], NO_PAGE)
            self._first[rows[at]] = place + here
            is_done = is_through & (left == 0)  # a full page was the last: the next is a new one
            self._last[rows[at[is_done]]] = NO_PAGE
            self._release(pages[is_through])
            start = start + here
            goes_on = left > 0
            at, left, start = at[goes_on], left[goes_on], start[goes_on]
            place = following[goes_on] * PAGE
            spans = np.minimum(left, PAGE)
            shifts = np.repeat(place - np.cumsum(spans) + spans, spans) + np.arange(spans.sum())
            targets = np.repeat(start - np.cumsum(spans) + spans, spans) + np.arange(spans.sum())
            places[targets] = shifts

    def _forget(self, rows: I64) -> None:
        """Free the pages of rows, read or not."""
        counts = self._count[rows]
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(counts, out=offsets[1:])
        self._read(rows, counts, offsets)
        last = self._last[rows]
        self._release(last[last != NO_PAGE])
        self._last[rows] = NO_PAGE
        self._room[rows] = 0

    def _release(self, pages: I64) -> None:
        self._free[self._num_free : self._num_free + len(pages)] = pages
        self._num_free += len(pages)

    def _grow_rows(self) -> None:
        size = len(self._stream)
        if self._top > size:
            more = max(self._top - size, size)
            for name in ("reader", "count", "reason", "is_told", "first", "room"):
                array = getattr(self, f"_{name}")
                setattr(self, f"_{name}", np.append(array, np.zeros(more, array.dtype)))
            self._stream = np.append(self._stream, np.full(more, CLOSED))
            self._last = np.append(self._last, np.full(more, NO_PAGE))

    def _grow_pages(self, wanted: int) -> None:
        size = len(self._next)
        more = max(wanted, size, 64)
        self._next = np.append(self._next, np.zeros(more, np.int64))
        free = np.empty(size + more, np.int64)
        free[: self._num_free] = self._free[: self._num_free]
        free[self._num_free : self._num_free + more] = np.arange(size + more - 1, size - 1, -1)
        self._free, self._num_free = free, self._num_free + more
        self._tokens = np.append(self._tokens, np.zeros(PAGE * more, np.int32))
        if self._has_logprobs:
            self._logprobs = np.append(self._logprobs, np.zeros(PAGE * more, np.float32))


ONE_INDEX: I64 = np.zeros(1, np.int64)
NO_TOKENS: I32 = np.empty(0, np.int32)
NO_LOGPROBS: F32 = np.empty(0, np.float32)
NO_NEWS = News(ONE_INDEX[:0], ONE_INDEX, NO_TOKENS, NO_LOGPROBS, np.empty(0, np.uint8))


def _row(stream: int) -> int:
    return stream & ((1 << ROW_BITS) - 1)
