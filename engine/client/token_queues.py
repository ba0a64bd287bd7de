"""TokenQueues: a queue of tokens for each row, appended to and read for many rows at once.

The tokens lie in pages of a common arena; a row has a chain of pages, which are freed as they are
read. So memory holds only unread tokens.
"""

from __future__ import annotations

import numpy as np

from engine.steps.batch import F32, I32, I64

PAGE = 16  # tokens of a page: a cache line
_NO_PAGE = -1
NO_TOKENS: I32 = np.empty(0, np.int32)
NO_LOGPROBS: F32 = np.empty(0, np.float32)


class TokenQueues:
    """Queues of token ids and, once there are any, of their log-probabilities."""

    def __init__(self) -> None:
        # By row.
        self.count = np.zeros(0, np.int64)  # tokens in the queue
        self._first = np.zeros(0, np.int64)  # place in the arena of the next one to read
        self._last = np.zeros(0, np.int64)  # the page written to, if it is not read to its end
        self._free_places = np.zeros(0, np.int64)  # places left in it
        # By page.
        self._next = np.zeros(0, np.int64)  # of the same row
        self._free = np.zeros(0, np.int64)  # a stack of pages
        self._num_free = 0
        # By place, PAGE of them a page.
        self._tokens = np.zeros(0, np.int32)
        self._logprobs = np.zeros(0, np.float32)
        self._has_logprobs = False

    @property
    def num_pages(self) -> int:
        """Pages that hold tokens, or have room for the next ones of a row."""
        return len(self._next) - self._num_free

    def add_rows(self, count: int) -> None:
        """Add rows with empty queues."""
        more = np.zeros(count, np.int64)
        self.count, self._first = np.append(self.count, more), np.append(self._first, more)
        self._free_places = np.append(self._free_places, more)
        self._last = np.append(self._last, np.full(count, _NO_PAGE))

    def append(self, rows: I64, tokens: I32, logprobs: F32) -> None:
        """Append a token to each of these rows, which must be distinct; logprobs may be empty."""
        full = rows[self._free_places[rows] == 0]
        if len(full):
            self._add_pages(full)
        room = self._free_places[rows]
        places = self._last[rows] * PAGE + (PAGE - room)
        self._tokens[places] = tokens
        if len(logprobs):
            if not self._has_logprobs:
                self._has_logprobs = True
                self._logprobs = np.zeros(len(self._tokens), np.float32)
            self._logprobs[places] = logprobs
        self._free_places[rows] = room - 1
        self.count[rows] += 1

    def read(self, rows: I64) -> tuple[I64, I32, F32]:
        """Take everything out of these queues: offsets i64[rows + 1], token_ids i32[offsets[-1]]
        and logprobs f32 of as many, or none."""
        offsets, places = self._read(rows)
        logprobs = self._logprobs[places] if self._has_logprobs else NO_LOGPROBS
        return offsets, self._tokens[places], logprobs

    def read_one(self, row: int) -> tuple[I32, F32]:
        """`read` a single row, without arrays of one."""
        count, place = int(self.count[row]), int(self._first[row])
        self.count[row] = 0
        if place % PAGE + count < PAGE and not self._has_logprobs:  # nearly always
            self._first[row] = place + count
            return self._tokens[place : place + count].copy(), NO_LOGPROBS
        parts, done = [], []
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
                self._last[row] = _NO_PAGE
        self._first[row] = place
        if done:
            self._release(np.array(done))
        tokens = np.concatenate([self._tokens[part] for part in parts] or [NO_TOKENS])
        if not self._has_logprobs:
            return tokens, NO_LOGPROBS
        return tokens, np.concatenate([self._logprobs[part] for part in parts] or [NO_LOGPROBS])

    def forget(self, rows: I64) -> None:
        """Empty these queues, and free their room for more."""
        rows = rows[(self.count[rows] > 0) | (self._last[rows] != _NO_PAGE)]
        self._read(rows)
        last = self._last[rows]
        self._release(last[last != _NO_PAGE])
        self._last[rows] = _NO_PAGE
        self._free_places[rows] = 0

    def _add_pages(self, rows: I64) -> None:
        if self._num_free < len(rows):
            self._grow(len(rows) - self._num_free)
        self._num_free -= len(rows)
        pages = self._free[self._num_free : self._num_free + len(rows)]
        is_chained = self.count[rows] > 0
        self._next[self._last[rows[is_chained]]] = pages[is_chained]
        self._first[rows[~is_chained]] = pages[~is_chained] * PAGE
        self._last[rows] = pages
        self._free_places[rows] = PAGE

    def _read(self, rows: I64) -> tuple[I64, I64]:
        """Return offsets, and where in the arena the tokens lie, i64[offsets[-1]]."""
        counts = self.count[rows]
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(counts, out=offsets[1:])
        # Right if no page ends among a row's tokens; else `_follow` corrects them.
        places = np.repeat(self._first[rows] - offsets[:-1], counts)
        places += np.arange(len(places))
        if (self._first[rows] % PAGE + counts < PAGE).all():
            self._first[rows] += counts
        else:
            self._follow(rows, counts, offsets, places)
        self.count[rows] = 0
        return offsets, places

    def _follow(self, rows: I64, counts: I64, offsets: I64, places: I64) -> None:
        """Correct places that lie behind the end of a page, page by page; free what was read."""
        at, left, place = np.arange(len(rows)), counts.copy(), self._first[rows]
        start = offsets[:-1].copy()
        while len(at):
            here = np.minimum(PAGE - place % PAGE, left)
            left = left - here
            is_through = (place % PAGE + here == PAGE) & (here > 0)
            pages = place // PAGE
            following = np.where(left > 0, self._next[pages], _NO_PAGE)
            self._first[rows[at]] = place + here
            is_done = is_through & (left == 0)  # a full page was the last: the next is a new one
            self._last[rows[at[is_done]]] = _NO_PAGE
            self._release(pages[is_through])
            goes_on = left > 0
            at, left, start = at[goes_on], left[goes_on], (start + here)[goes_on]
            place = following[goes_on] * PAGE
            spans = np.minimum(left, PAGE)
            before = np.cumsum(spans) - spans
            ramp = np.arange(spans.sum())
            places[np.repeat(start - before, spans) + ramp] = (
                np.repeat(place - before, spans) + ramp
            )

    def _release(self, pages: I64) -> None:
        self._free[self._num_free : self._num_free + len(pages)] = pages
        self._num_free += len(pages)

    def _grow(self, wanted: int) -> None:
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
