"""Unread tokens: a step's new tokens are divided among their readers, which keep them until they
are read, so that a slow one delays nobody. Knows no requests and no text.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np

from srm.engine.steps.batch import I32, I64, Bool
from srm.engine.steps.tokens import (
    NO_LOGPROBS,
    NO_TOKENS,
    NO_TOP_IDS,
    NO_TOP_LOGPROBS,
    U8,
    Tokens,
    join,
)
from srm.errors import InvalidRequest, Overloaded

INDEX_BITS = 20
"""Bits of a stream number: the low ones are the completion's index, the high ones its reader."""
INDEX = (1 << INDEX_BITS) - 1
MAX_READERS = 2**20
UNUSED_READERS = 2**16
"""How many other numbers are given out before one is reused: so tokens still on their way to its
old reader do not reach the new one."""
MORE_PARTS = 32
"""Tables that come before a reader merges some again."""
RUNS, HAS_ENDED, IS_OVER = range(3)
"""States of a completion: it goes on, its end is here, or its end was read or is not wanted."""
IS_OPEN, IS_DIRECT, IS_FILTERED, IS_SEARCHED = range(4)
"""Flags of a reader: it is there; its tokens are handed out; some that come may be unwanted; some
may end it, for what they say."""
EndSome = Callable[[I64, I32, U8], None]
"""Sets the reasons of completions that end with these tokens, one each."""


class UnreadTokens:
    """What a reader has not read: tables in the order of their steps.

    They are merged now and then, so that of many tokens little more than these is kept, and each
    token is copied only as often as the tokens double.
    """

    def __init__(self, number: int, size: int, num_counts: int, num_top: int | None) -> None:
        self.number, self.num_top = number, num_top
        self.says_versions = False
        """Whether each token is kept with the version of the weights that made it."""
        self.end_some: EndSome | None = None
        """Called with new tokens before they are kept."""
        self.has_new = False
        """Whether anything came since the last call of `read`."""
        self.version = self.first_version = 0
        """Weights version of the last tokens, and the oldest that made any; 0: none came."""
        self.state: U8 = np.zeros(size, np.uint8)
        self.num_come: I32 = np.zeros(num_counts, np.int32)
        """With several engines: tokens that came of completions, then prompts' scores."""
        self.num_again = self.num_come.copy()
        """How many of them come again."""
        self.waiter: asyncio.Future[None] | None = None
        self._parts: list[Tokens] = []
        self._most_parts = MORE_PARTS
        self._has_ends = False  # that were not read
        self._num_over = 0  # of their tokens, how many are of completions that are over

    def add(self, tokens: Tokens, version: int) -> None:
        """Keep new tokens of completions that run."""
        if self.says_versions:
            tokens = replace(tokens, versions=np.full(len(tokens.token_ids), version, np.int32))
        self._parts.append(tokens)
        self.note_new(version, version)
        if len(self._parts) > self._most_parts:
            at, size = len(self._parts) - 1, _size(self._parts[-1])
            while at and (before := _size(self._parts[at - 1])) <= 2 * size:
                at, size = at - 1, size + before
            self._merge(at)
            self._most_parts = len(self._parts) + MORE_PARTS

    def add_ends(self, indices: I64) -> None:
        """Note completions that have ended, whose last rows were added."""
        self.state[indices] = HAS_ENDED
        self._has_ends = True
        if len(self._parts) > 1 and self.state.all():
            self._merge(0)  # others' rows of the same tables are not to stay in memory

    @property
    def comes_again(self) -> bool:
        """Whether something is expected that came before, of what still runs."""
        runs, again = self.state == RUNS, self.num_again > 0
        of_samples, of_prompts = np.split(again, [len(runs)])
        runs_of = runs.reshape(len(of_prompts), -1).any(axis=1)
        return bool((of_samples & runs).any() or (of_prompts & runs_of).any())

    def note_new(self, first_version: int, version: int) -> None:
        """Note that something came, of a request that began with weights `first_version`."""
        self.version = version
        self.first_version = min(self.first_version or version, first_version)
        if not self.has_new:
            self.has_new = True
            self.wake()

    def wake(self) -> None:
        """Let go on who waits for something new."""
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    def read(self, only_ended: bool = False) -> Tokens:
        """Return what was not read; `only_ended`: of completions that have ended."""
        self.has_new = False
        if not self._parts:
            return NO_TOKENS
        if only_ended:
            return self._read_ended()
        is_one = len(self._parts) == 1 and not self._num_over
        tokens = self._parts[0] if is_one else self._join(self._parts)
        self._parts, self._most_parts, self._num_over = [], MORE_PARTS, 0
        if self._has_ends:
            self._has_ends = False
            self.state[self.state == HAS_ENDED] = IS_OVER
        return tokens

    def end(self, indices: I64) -> int:
        """Let completions be over, and drop what was not read of them: how many tokens."""
        before = self.num_tokens
        self.state[indices] = IS_OVER
        if self._parts:
            self._num_over += 1  # so that some are looked for
            self._merge(0)
        return before - self.num_tokens

    @property
    def num_tokens(self) -> int:
        """Tokens that were not read."""
        return sum(len(part.token_ids) for part in self._parts) - self._num_over

    def _read_ended(self) -> Tokens:
        if not self._has_ends:
            return NO_TOKENS
        self._has_ends, has_ended = False, self.state == HAS_ENDED
        rows = [(table, has_ended[table.owners]) for table in self._parts]
        tokens = join([NO_TOKENS, *(table.select(mask) for table, mask in rows if mask.any())])
        self.state[has_ended] = IS_OVER
        self._num_over += len(tokens.token_ids)
        if self._num_over >= self.num_tokens:  # half of all: worth a copy
            self._merge(0)
        return tokens

    def _merge(self, at: int) -> None:
        """Make one table of all from this one on."""
        tokens = self._join(self._parts[at:])
        if not at:
            self._num_over = 0
        self._parts[at:] = [tokens] if len(tokens) else []

    def _join(self, parts: list[Tokens]) -> Tokens:
        """Return one table, without completions that are over."""
        tokens = join(parts)
        return tokens.select(self.state[tokens.owners] != IS_OVER) if self._num_over else tokens


class TokenTable:
    """All readers of an API process."""

    def __init__(self, counts: bool) -> None:
        """`counts`: they are to know what came, for what comes again."""
        self.counts = counts
        self.flags: Bool = np.zeros((4, 64), np.bool_)  # by flag and number of the reader
        self.version = 0
        """Version of the weights that made the last tokens."""
        self._unread: dict[int, UnreadTokens] = {}  # by number
        self._unused: deque[int] = deque()
        self._num_numbers = 0  # ever given out
        self._uncounted: list[I64] = []  # owners of tokens that came

    def open(self, size: int, num_prompts: int, num_top: int | None) -> UnreadTokens:
        """Make room for `size` completions of a reader, who asks for log-probabilities of so many
        alternatives to each token, or for none.

        Raises InvalidRequest for more than a reader may have, Overloaded for too many readers.
        """
        if size > 1 << INDEX_BITS:
            raise InvalidRequest(
                f"prompts x n must be at most {1 << INDEX_BITS} in one request, got {size}", "n"
            )
        is_full = self._num_numbers == MAX_READERS
        if len(self._unused) > UNUSED_READERS or (self._unused and is_full):
            number = self._unused.popleft()
        elif is_full:
            raise Overloaded(f"more than {MAX_READERS} requests are answered at once")
        else:
            number, self._num_numbers = self._num_numbers, self._num_numbers + 1
            if number == self.flags.shape[1]:
                self.flags = np.pad(self.flags, ((0, 0), (0, number)))
        self.flags[:, number] = True, False, False, False
        num_counts = size + num_prompts if self.counts else 0
        self._unread[number] = UnreadTokens(number, size, num_counts, num_top)
        return self._unread[number]

    def close(self, number: int) -> None:
        """Drop what a reader has not read, and all that still comes for it."""
        del self._unread[number]
        self.flags[:, number] = False
        self._unused.append(number)

    def put(self, tokens: Tokens, version: int) -> Tokens | None:
        """Give readers a step's tokens, but for those of completions that are over. Returns the
        rows that are handed out, if there are any."""
        is_open, is_direct, is_filtered, _ = self.flags
        if version != self.version:  # a reader is to hear of it first
            is_direct[:] = False
            self.version = version
        numbers = tokens.owners >> INDEX_BITS
        assert not len(numbers) or numbers.max() < self._num_numbers, "rows of somebody else"
        if (is_filtered[numbers] | ~is_open[numbers]).any():
            tokens = self._filter(tokens, numbers)
            numbers = tokens.owners >> INDEX_BITS
        if self.counts:
            self._uncounted.append(tokens.owners[tokens.token_ids >= 0])
            if len(self._uncounted) > MORE_PARTS:
                self.count_tokens()
        is_direct[numbers[(tokens.reasons != 0) | (tokens.token_ids < 0)]] = False
        is_handed_out = is_direct[numbers]
        if is_handed_out.all():
            return tokens if len(numbers) else None
        if not is_handed_out.any():
            self._divide(tokens)
            return None
        self._divide(tokens.select(~is_handed_out))
        return tokens.select(is_handed_out)

    def keeps_searched(self, tokens: Tokens, version: int) -> bool:
        """Whether `put` would no longer hand out the tokens of a reader that is searched."""
        if version != self.version:  # of all readers, whether they have rows or not
            return bool((self.flags[IS_SEARCHED] & self.flags[IS_DIRECT]).any())
        ended = tokens.owners[tokens.reasons != 0] >> INDEX_BITS
        return bool(self.flags[IS_SEARCHED, ended].any())

    def count_tokens(self) -> None:
        """Count what came lately, for readers that are there."""
        owners = np.sort(np.concatenate(self._uncounted or [NO_TOKENS.owners]))
        self._uncounted = []
        owners = owners[self.flags[IS_OPEN, owners >> INDEX_BITS]]
        for reader, begin, end in self._rows(owners):
            np.add.at(reader.num_come, owners[begin:end] & INDEX, 1)

    def end(self, reader: UnreadTokens, indices: I64) -> int:
        """Let completions be over, and drop what was not read of them: how many tokens."""
        self.flags[IS_FILTERED, reader.number] = True
        return reader.end(indices)

    def shut(self, reader: UnreadTokens) -> None:
        """Keep nothing that still comes for a reader; what it has not read stays."""
        self.flags[:, reader.number] = False

    def expect_again(self, reader: UnreadTokens, counts: I64) -> None:
        """Keep nothing again of what is counted there: all of it comes once more."""
        self.count_tokens()
        self.flags[IS_FILTERED, reader.number] = True
        reader.num_again[counts] = reader.num_come[counts]

    def _filter(self, tokens: Tokens, numbers: I64) -> Tokens:
        """Return the rows that somebody wants, with -1 in place of tokens that came before."""
        token_ids, is_wanted = tokens.token_ids.copy(), self.flags[IS_OPEN, numbers]
        rows = np.flatnonzero(is_wanted & self.flags[IS_FILTERED, numbers])
        rows = rows[np.argsort(numbers[rows])]
        for reader, begin, end in self._rows(tokens.owners[rows]):
            own = rows[begin:end]
            indices = tokens.owners[own] & INDEX
            is_wanted[own] = reader.state[indices] == RUNS
            if self.counts:
                comes_again = reader.num_again[indices] > 0
                reader.num_again[indices] -= comes_again
                token_ids[own[comes_again]] = -1
                is_wanted[own[comes_again & (tokens.reasons[own] == 0)]] = False
        return replace(tokens, token_ids=token_ids).select(is_wanted)

    def _divide(self, tokens: Tokens) -> None:
        has_token = tokens.token_ids >= 0
        if not has_token.all():
            ends = tokens.select(~has_token)
            self._divide(tokens.select(has_token))
            offsets = np.zeros(len(ends) + 1, np.int64)
            tokens = Tokens(ends.owners, offsets, ends.token_ids[:0], ends.reasons)
        owners, token_ids, reasons = tokens.owners, tokens.token_ids, tokens.reasons.copy()
        logprobs, order = tokens.logprobs, None
        if (owners[1:] < owners[:-1]).any():
            order = np.argsort(owners)
            owners, reasons = owners[order], reasons[order]
            token_ids = token_ids[order] if len(token_ids) else token_ids
            logprobs = logprobs[order] if len(logprobs) else logprobs
        indices = owners & INDEX
        for reader, begin, end in self._rows(owners):
            rows, num_top, top = slice(begin, end), reader.num_top, (NO_TOP_IDS, NO_TOP_LOGPROBS)
            if num_top and len(token_ids):
                places = rows if order is None else order[rows]
                top = tokens.top_ids[places, :num_top], tokens.top_logprobs[places, :num_top]
            if reader.end_some is not None and len(token_ids):
                reader.end_some(indices[rows], token_ids[rows], reasons[rows])
            own_logprobs = NO_LOGPROBS if num_top is None else logprobs[rows]
            own = indices[rows], tokens.offsets[: end - begin + 1], token_ids[rows], reasons[rows]
            reader.add(Tokens(*own, own_logprobs, *top), self.version)
        if len(at := np.flatnonzero(reasons)):
            for reader, begin, end in self._rows(owners[at]):
                reader.add_ends(indices[at[begin:end]])
                self.flags[IS_FILTERED, reader.number] = True

    def _rows(self, owners: I64) -> Iterator[tuple[UnreadTokens, int, int]]:
        """Yield which of these rows, whose owners ascend, are of each reader."""
        numbers = owners >> INDEX_BITS
        begins = np.flatnonzero(np.diff(numbers, prepend=-1))
        bounds = [*begins.tolist(), len(owners)]
        for number, (begin, end) in zip(numbers[begins].tolist(), pairwise(bounds), strict=True):
            yield self._unread[number], begin, end


def _size(tokens: Tokens) -> int:
    return len(tokens.owners) + len(tokens.token_ids)
