"""`until`: which samples of a prompt are in the reply, and which may start meanwhile.

With a count m, the samples of index 0 … j are in the reply, j the smallest index up to which m
samples match. So it depends on the samples alone, not on when they end, and short ones have no
advantage. A budget is spent on samples in an order that depends on them alone too. Samples start in
growing waves: those that are not needed in the end are few.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

FIRST_WAVE = 64
"""Samples of a prompt that start at once where `until` may need no more. With 1 right in 100, 1.8
times the tokens needed are computed, with 128 2.0 and with 32 1.6 (`srm bench until`); fewer take
more waves, one after the other."""
AHEAD = 256
"""Samples of all prompts that share a budget which start before any has been paid."""

_Sample = TypeVar("_Sample")


class Measured(Protocol):
    """A sample that a budget is spent on."""

    @property
    def num_tokens(self) -> int: ...
    @property
    def matched(self) -> bool | None: ...


_Measured = TypeVar("_Measured", bound=Measured)


class EarlyStop(Generic[_Sample]):
    """The samples of one prompt, until enough of them match."""

    def __init__(self, n: int, enough: int, first_wave: int | None = None) -> None:
        """`enough` is how many must match, 1 … n; `first_wave` is FIRST_WAVE if it is None."""
        self.end = n
        """Samples from this index on are not in the reply; it only decreases."""
        self._enough, self._ended = enough, 0
        self._first_wave = max(FIRST_WAVE if first_wave is None else first_wave, enough)
        self._smallest: list[int] = []  # negated indices of the first that matched, a heap
        self._next = 0  # all before it have been returned
        self._held: dict[int, _Sample] = {}

    @property
    def start_below(self) -> int:
        """Samples before this index may start: as many as must match at first, then two more for
        each that has ended. Once enough match, all those before the last one are needed."""
        if len(self._smallest) == self._enough:
            return self.end
        return min(self.end, self._first_wave + 2 * self._ended)

    @property
    def is_over(self) -> bool:
        """Whether all samples that may be in the reply have been returned."""
        return self._next >= self.end

    def add_sample(self, index: int, matched: bool, sample: _Sample) -> list[_Sample]:
        """Add a finished sample; return those now known to be in the reply, in order."""
        self._ended += 1
        if index >= self.end:
            return []
        self._held[index] = sample
        if matched:
            heapq.heappush(self._smallest, -index)
            if len(self._smallest) > self._enough:
                heapq.heappop(self._smallest)
            if len(self._smallest) == self._enough:
                self.end_at(1 - self._smallest[0])
        certain = []
        while self._next < self.end and self._next in self._held:
            certain.append(self._held.pop(self._next))
            self._next += 1
        return certain

    def end_at(self, end: int) -> None:
        """Have no sample from this index on in the reply."""
        for index in range(end, self.end):  # n in all, however often it is called
            self._held.pop(index, None)
        self.end = min(end, self.end)


class SharedBudget(Generic[_Measured]):
    """The order in which prompts spend a budget of tokens, a sample at a time.

    First each has one. Then comes the prompt that had fewest tokens for each of its matches and one
    more, of equal ones the first, unless enough of its samples match or all n are drawn. So what
    is solved leaves its tokens to the rest, and what never matches gets less than what does.
    """

    def __init__(self, early_stops: Sequence[EarlyStop[_Measured]], budget: int) -> None:
        self.is_spent = False
        """Whether no sample is needed beyond those returned."""
        self._early_stops, self._budget = early_stops, budget
        self._queues: list[deque[_Measured]] = [deque() for _ in early_stops]
        self._drawn, self._tokens, self._matches = ([0] * len(early_stops) for _ in range(3))
        self._all_drawn = self._all_tokens = 0
        self._untried = len(early_stops)
        self._next = [(-1.0, prompt) for prompt in range(len(early_stops))]  # a heap: the next paid
        self._started = [0] * len(early_stops)
        self._ahead = 0  # started and not drawn, of prompts that go on
        self._line = self._next.copy()  # a heap: whose next sample starts, as far as is known

    def spend(self, prompt: int, samples: Iterable[_Measured]) -> list[_Measured]:
        """Add samples that follow those before of a prompt; return the ones whose turn came."""
        paid: list[_Measured] = []
        if self.is_spent:
            return paid
        self._queues[prompt].extend(samples)
        while self._next and (queue := self._queues[place := self._next[0][1]]):
            sample = queue.popleft()
            paid.append(sample)
            self._pay(place, sample)
            if self._all_tokens >= self._budget and not self._untried:
                self._end()
        return paid

    def start_more(self) -> dict[int, int]:
        """Return the prompts of which more samples may start, each with how many in all: what is
        paid next and the first of each, then as many as have been drawn, or as what is left is
        enough for."""
        more: dict[int, int] = {}
        if self._next and self._started[place := self._next[0][1]] == self._drawn[place]:
            more[place] = self._start(place)
        left = self._budget - self._all_tokens
        most = max(self._untried, min(max(AHEAD, self._all_drawn), 1 + left // self._mean))
        while self._line and self._ahead < most:
            before, place = heapq.heappop(self._line)
            if self._started[place] == 0 or self._rank(place) <= before:
                if self._started[place] >= self._early_stops[place].end:
                    continue
                more[place] = self._start(place)
            heapq.heappush(self._line, (self._rank(place), place))
        return more

    @property
    def _mean(self) -> int:
        return max(1, self._all_tokens // max(1, self._all_drawn))

    def _rank(self, place: int) -> float:
        """The sort key of a prompt's turn, if samples that were started and not drawn have the mean
        length; one that had no sample comes first."""
        tokens = self._tokens[place] + self._mean * (self._started[place] - self._drawn[place])
        return tokens / (self._matches[place] + 1)

    def _start(self, place: int) -> int:
        self._started[place] += 1
        self._ahead += 1
        return self._started[place]

    def _pay(self, place: int, sample: _Measured) -> None:
        self._untried -= not self._drawn[place]
        self._drawn[place] += 1
        self._tokens[place] += sample.num_tokens
        self._matches[place] += bool(sample.matched)
        self._all_drawn += 1
        self._all_tokens += sample.num_tokens
        self._ahead -= 1
        if self._drawn[place] < self._early_stops[place].end:
            rank = self._tokens[place] / (self._matches[place] + 1)
            heapq.heapreplace(self._next, (rank, place))
        else:
            heapq.heappop(self._next)
            self._ahead -= self._started[place] - self._drawn[place]

    def _end(self) -> None:
        for draw, drawn in zip(self._early_stops, self._drawn, strict=True):
            draw.end_at(drawn)
        self.is_spent = True
        self._next.clear()
        self._line.clear()
        self._queues.clear()


class EarlyStops(Generic[_Measured]):
    """The samples of all prompts of a request, until enough of each match or a budget is spent."""

    def __init__(self, each: Sequence[int], enough: int, budget: int | None = None) -> None:
        """`each` says how many samples of each prompt there may be, `enough` as for EarlyStop;
        `budget` is in tokens, None: no limit."""
        self._stops = [EarlyStop[_Measured](n, enough) for n in each]
        self._budget = None if budget is None else SharedBudget(self._stops, budget)
        self._ends = [*each]  # that have been told
        self._touched = set(range(len(each)))  # prompts with samples added since `start_more`
        self.below = [0] * len(each)
        """How many samples of each prompt may start, the first ones."""
        self.start_more()

    def is_over(self, prompt: int) -> bool:
        """Whether all samples of a prompt that may be in the reply have been returned."""
        return self._stops[prompt].is_over

    def needs(self, prompt: int, index: int) -> bool:
        """Whether a sample may be in the reply."""
        return index < self._stops[prompt].end

    def add_sample(
        self, prompt: int, index: int, matched: bool, sample: _Measured
    ) -> list[_Measured]:
        """Add a finished sample; return those now known to be in the reply."""
        self._touched.add(prompt)
        known = self._stops[prompt].add_sample(index, matched, sample)
        return known if self._budget is None else self._budget.spend(prompt, known)

    def unneeded(self) -> Iterator[tuple[int, int, int]]:
        """Yield prompt, begin, end: samples begin … end - 1 are known not to be in the reply. Each
        is named once."""
        is_spent = self._budget is not None and self._budget.is_spent
        for prompt in range(len(self._stops)) if is_spent else self._touched:
            before, end = self._ends[prompt], self._stops[prompt].end
            if end < before:
                self._ends[prompt] = end
                yield prompt, end, before

    def start_more(self) -> dict[int, int]:
        """Return the prompts of which more samples may start since the last call, each with how
        many in all."""
        touched, self._touched = self._touched, set()
        if self._budget is None:
            more = {prompt: self._stops[prompt].start_below for prompt in touched}
        else:
            more = self._budget.start_more()
        for prompt, below in more.items():
            self.below[prompt] = below
        return more
