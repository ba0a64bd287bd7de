"""TokenTable: an API process's new tokens, from when they arrive until they are read.

Every completion of which anything has come has a row. A step's tokens are appended to all rows at
once, as arrays; the reader of a row takes what was added since the last time, so a slow reader is
only a cursor that stands still: its own tokens wait, and nobody else's. Knows no requests and no
text. Keeps: what the engine refuses takes no row.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from engine.client.alternatives import Alternatives
from engine.client.token_queues import TokenQueues
from engine.errors import InvalidRequest, Overloaded
from engine.steps.batch import I32, I64, Bool
from engine.steps.tokens import NO_TOKENS, Tokens


class Stretches:
    """Ranges of places 0, 1, 2, … given out in stretches of any size, and taken back.

    A stretch begins in the first gap that has room, or behind all others; adjacent gaps are merged.
    So the places in use stay below the peak ever used at once, but for gaps too small for any
    stretch.
    """

    def __init__(self) -> None:
        self.end = 0  # of the last stretch
        # Gaps before it: ascending, and none touches the next.
        self._begins: list[int] = []
        self._ends: list[int] = []

    def allocate(self, size: int) -> int:
        """Take a stretch of `size` places; return its first."""
        for at, (begin, end) in enumerate(zip(self._begins, self._ends, strict=True)):
            if end - begin >= size:
                self._begins[at] += size
                if self._begins[at] == end:
                    del self._begins[at], self._ends[at]
                return begin
        self.end += size
        return self.end - size

    def give_back(self, begin: int, size: int) -> None:
        """Free a stretch."""
        end, at = begin + size, bisect_left(self._begins, begin)
        if at < len(self._begins) and self._begins[at] == end:
            end = self._ends[at]
            del self._begins[at], self._ends[at]
        if at and self._ends[at - 1] == begin:
            at -= 1
            begin = self._begins[at]
            del self._begins[at], self._ends[at]
        if end == self.end:
            self.end = begin
        else:
            self._begins.insert(at, begin)
            self._ends.insert(at, end)


INDEX_BITS = 20
"""Bits of a stream number: the low ones are the completion's index, the high ones its reader."""
MAX_READERS = 2**20
UNUSED_READERS = 2**16
"""How many other numbers are given out before one is reused: so tokens still on their way to its
old reader do not reach the new one."""
CLOSED, NO_ROWS = -2, -1
"""Values in place of a reader's first row: it has closed, or nothing has come for it yet."""
NOBODY = -1


class Arrived(NamedTuple):
    """The result of `TokenTable.put`: where a step's rows went."""

    readers: I64
    """Readers that have new tokens to take, maybe twice."""
    direct: Tokens | None
    """Rows that are handed out, if there are any."""


class TokenTable:
    """Rows of tokens: appended by the step, read and forgotten by the reader."""

    def __init__(self, counts: bool = False) -> None:
        """`counts`: it is to know what was read, for `skip_read`."""
        self._counts = counts
        self._queues = TokenQueues()
        self._alternatives = Alternatives()
        self._stretches = Stretches()
        self._unused: deque[int] = deque()
        # By the number above INDEX_BITS.
        self._row = np.full(0, CLOSED, np.int32)  # the first of its rows
        self._size = np.zeros(0, np.int32)
        self._reader = np.zeros(0, np.int32)  # whom to wake
        self._num_top = np.zeros(0, np.int32)  # alternatives that it asked for
        self._is_direct = np.zeros(0, np.bool_)  # its tokens are handed out as they arrive
        self._num_numbers = 0  # ever given out
        # By row.
        self._reason = np.zeros(0, np.uint8)
        self._is_end_read = np.zeros(0, np.bool_)
        self._num_come = np.zeros(0, np.int32)  # tokens ever appended, if they are counted
        self._num_skipped = np.zeros(0, np.int32)  # tokens still to come that came before
        self._add_rows(64)

    @property
    def num_pages(self) -> int:
        """Pages of memory that hold tokens nobody has read, or have room for the next ones."""
        return self._queues.num_pages

    @property
    def num_alternatives(self) -> int:
        """Rows that hold alternatives of tokens that nobody has read."""
        return self._alternatives.num_rows

    @property
    def num_rows(self) -> int:
        """Rows that memory is allocated for."""
        return len(self._reason)

    def open(self, size: int, reader: int, num_top: int = 0) -> int:
        """Make room for `size` completions of a reader, who asks for so many alternatives of each
        token; return the stream number of the first.

        Raises InvalidRequest for more than a reader may have, Overloaded for too many readers.
        """
        if size > 1 << INDEX_BITS:
            raise InvalidRequest(
                f"prompts x n must be at most {1 << INDEX_BITS} in one request, got {size}", "n"
            )
        if len(self._unused) > UNUSED_READERS or (
            self._unused and self._num_numbers == MAX_READERS
        ):
            number = self._unused.popleft()
        elif self._num_numbers == MAX_READERS:
            raise Overloaded(f"more than {MAX_READERS} requests are answered at once")
        else:
            number, self._num_numbers = self._num_numbers, self._num_numbers + 1
            if number == len(self._row):
                more = max(64, number)
                self._row = np.append(self._row, np.full(more, CLOSED, np.int32))
                self._size = np.append(self._size, np.zeros(more, np.int32))
                self._reader = np.append(self._reader, np.zeros(more, np.int32))
                self._num_top = np.append(self._num_top, np.zeros(more, np.int32))
                self._is_direct = np.append(self._is_direct, np.zeros(more, np.bool_))
        self._row[number], self._size[number], self._reader[number] = NO_ROWS, size, reader
        self._num_top[number] = num_top
        return number << INDEX_BITS

    def close(self, first: int, size: int) -> None:
        """Free a reader's completions; what was not read is dropped."""
        number = first >> INDEX_BITS
        row = int(self._row[number])
        assert row != CLOSED, "closed twice"
        if row != NO_ROWS:
            self._forget(number, np.arange(row, row + size))
            self._stretches.give_back(row, size)
        self._row[number] = CLOSED
        self._is_direct[number] = False
        self._unused.append(number)

    def set_direct(self, first: int, is_direct: bool) -> None:
        """Have `put` hand out the tokens of a reader, who took all that came before, until the last
        one of any of its completions comes."""
        self._is_direct[first >> INDEX_BITS] = is_direct

    def end_direct(self) -> None:
        """Append all tokens that come from now on."""
        self._is_direct[:] = False

    def put(self, new: Tokens) -> Arrived:
        """Append a step's rows, but for those that are handed out. Rows of closed or ended streams
        are dropped."""
        numbers = new.owners >> INDEX_BITS
        assert not len(numbers) or numbers.max() < self._num_numbers, "rows of somebody else"
        first_rows = self._row[numbers]
        if (first_rows < 0).any():
            for number in np.unique(numbers[first_rows == NO_ROWS]).tolist():
                self._give_rows(number)
            # What stands for no row is no number: nothing is counted from it.
            new = new.select(self._row[numbers] != CLOSED)
            numbers = new.owners >> INDEX_BITS
            first_rows = self._row[numbers]
        rows = first_rows + (new.owners & _INDEX)
        runs = self._reason[rows] == 0
        if not runs.all():
            rows, numbers, new = rows[runs], numbers[runs], new.select(runs)
        if self._counts:
            new = replace(new, token_ids=self._not_come(rows, new.token_ids))
        direct = None
        self._is_direct[numbers[(new.reasons != 0) | (new.token_ids < 0)]] = False
        is_direct = self._is_direct[numbers]
        if is_direct.any():
            direct = new.select(is_direct)
            rows, numbers, new = rows[~is_direct], numbers[~is_direct], new.select(~is_direct)
        self._reason[rows] = new.reasons
        has_token, readers = new.token_ids >= 0, self._reader[numbers]
        if not has_token.all():
            readers = readers[has_token | (new.reasons != 0)]
            rows, numbers, new = rows[has_token], numbers[has_token], new.select(has_token)
        self._queues.append(rows, new.token_ids, new.logprobs)
        if count := len(new.top_ids):
            num_top = self._num_top[numbers[:count]]
            self._alternatives.append(rows[:count], num_top, new.top_ids, new.top_logprobs)
        return Arrived(readers, direct)

    def skip_read(self, first: int, indices: I64) -> None:
        """Deliver no token again of these completions, all of whose tokens come once more."""
        if self._row_of(first) >= 0:
            rows = self._row_of(first) + indices
            self._num_skipped[rows] = self._num_come[rows]

    def _not_come(self, rows: I64, tokens: I32) -> I32:
        """Return a step's tokens with -1 in place of those that came before."""
        comes_again = self._num_skipped[rows] > 0
        if comes_again.any():
            self._num_skipped[rows[comes_again]] -= 1
            tokens = np.where(comes_again, np.int32(-1), tokens)
        self._num_come[rows] += tokens >= 0
        return tokens

    def read_new(self, first: int, size: int, only_ended: bool = False) -> Tokens:
        """Take new tokens of `size` completions from `first` on; `only_ended`: if they ended."""
        row = self._row_of(first)
        if row < 0:
            return NO_TOKENS
        if size == 1 and not only_ended:
            return self._take_one(row, int(self._num_top[first >> INDEX_BITS]))
        stretch = slice(row, row + size)
        has_ended = (self._reason[stretch] != 0) & ~self._is_end_read[stretch]
        if not only_ended:
            has_ended |= self._queues.count[stretch] > 0
        indices = np.flatnonzero(has_ended)
        rows = indices + row
        reasons = self._reason[rows]
        self._is_end_read[rows] = reasons != 0
        offsets, token_ids, logprobs = self._queues.read(rows)
        tops = self._alternatives.read(rows, int(self._num_top[first >> INDEX_BITS]))
        return Tokens(indices, offsets, token_ids, reasons, logprobs, *tops)

    def _take_one(self, row: int, num_top: int) -> Tokens:
        reason = int(self._reason[row])
        if not self._queues.count[row] and (not reason or self._is_end_read[row]):
            return NO_TOKENS
        self._is_end_read[row] = reason != 0
        token_ids, logprobs = self._queues.read_one(row)
        reasons = np.array([reason], np.uint8)
        tops = self._alternatives.read(np.array([row]), num_top) if num_top else ()
        offsets = np.array([0, len(token_ids)])
        return Tokens(FIRST, offsets, token_ids, reasons, logprobs, *tops)

    def reader(self, stream: int) -> int:
        """Return the reader of a stream; NOBODY if it is closed."""
        number = stream >> INDEX_BITS
        is_open = number < self._num_numbers and self._row[number] != CLOSED
        return int(self._reader[number]) if is_open else NOBODY

    def mute(self, first: int, indices: I64) -> int:
        """End completions and deliver nothing more of them, not even their end. Returns how many of
        their tokens were unread."""
        if self._row_of(first) < 0:
            self._give_rows(first >> INDEX_BITS)
        rows = self._row_of(first) + indices
        self._reason[rows] = 1
        self._is_end_read[rows] = True
        unread = int(self._queues.count[rows].sum())
        self._forget(first >> INDEX_BITS, rows)
        return unread

    def are_ends_read(self, first: int, size: int) -> Bool:
        """bool[size]: whether the end of each of these completions has been read."""
        row = self._row_of(first)
        return self._is_end_read[row : row + size] if row >= 0 else np.zeros(size, np.bool_)

    def has_ended(self, first: int, index: int) -> bool:
        """Whether a completion has ended, read or not."""
        row = self._row_of(first)
        return row >= 0 and bool(self._reason[row + index])

    def ended(self, first: int, size: int) -> Bool:
        """bool[size]: `has_ended` of each."""
        row = self._row_of(first)
        if row < 0:
            return np.zeros(size, np.bool_)
        is_ended: Bool = self._reason[row : row + size] != 0
        return is_ended

    def _forget(self, number: int, rows: I64) -> None:
        """Drop what was not read of a reader's rows."""
        self._queues.forget(rows)
        if self._num_top[number]:
            self._alternatives.forget(rows)

    def _row_of(self, stream: int) -> int:
        """Return the row of an open stream; negative while its reader has no rows."""
        row = int(self._row[stream >> INDEX_BITS])
        return row + (stream & _INDEX) if row >= 0 else row

    def _give_rows(self, number: int) -> None:
        """Give a reader rows, now that its first token shows that its request was accepted."""
        assert self._row[number] == NO_ROWS, "it has rows, or is closed"
        size = int(self._size[number])
        row = self._stretches.allocate(size)
        if (more := self._stretches.end - self.num_rows) > 0:
            self._add_rows(max(more, self.num_rows))
        self._reason[row : row + size] = 0
        self._is_end_read[row : row + size] = False
        if self._counts:
            self._num_come[row : row + size] = self._num_skipped[row : row + size] = 0
        self._row[number] = row

    def _add_rows(self, count: int) -> None:
        self._queues.add_rows(count)
        self._reason = np.append(self._reason, np.zeros(count, np.uint8))
        self._is_end_read = np.append(self._is_end_read, np.zeros(count, np.bool_))
        if self._counts:
            more = np.zeros(count, np.int32)
            self._num_come = np.append(self._num_come, more)
            self._num_skipped = np.append(self._num_skipped, more)


_INDEX = (1 << INDEX_BITS) - 1
FIRST: I64 = np.zeros(1, np.int64)
