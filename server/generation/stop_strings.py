"""Finds stop strings in completions as soon as their tokens arrive, so that slots come free.

A stream with stop strings is read whether or not somebody takes its tokens, which wait here; one
without leaves them in the engine client's table. `StopStringWatch` searches only completions with
a new token that has a stop string or the beginning of one in it, which is cached per token, or
whose text ended in such a beginning: the others cost a look-up in an array. Keeps no text but what
may be the beginning of a stop string.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from functools import lru_cache

import numpy as np

from engine.client.streams import Delivery, Stream
from engine.messages import Output
from engine.steps.token_deltas import U8, TokenDeltas, merge
from server.text.sample import StopStrings
from server.text.text import ByteTable

_MOST_PARTS = 64
"""Most parts that wait unmerged."""


def do_nothing() -> None:
    """Take the place of a `go_on`."""


async def taken(
    stream: Stream, go_on: Callable[[], None] = do_nothing, only_ended: bool = False
) -> AsyncGenerator[Delivery, None]:
    """Yield what is new, until all has ended; `only_ended` as in `Stream.take`.

    `go_on` is called whenever all that was yielded is dealt with. Raises as `Stream.wait`.
    """
    while stream.unfinished:
        go_on()
        await stream.wait()
        yield stream.take(only_ended)


class StopStringStream:
    """Ends a stream's completions at stop strings, and keeps what was not asked for yet."""

    def __init__(self, stream: Stream, watch: StopStringWatch) -> None:
        self._stream = stream
        self._watch = watch
        self._scores: list[tuple[int, Output]] = []
        self._parts: list[TokenDeltas] = []
        self._version = 0
        self._has_come = asyncio.Event()

    async def taken(
        self, go_on: Callable[[], None], only_whole: bool
    ) -> AsyncGenerator[Delivery, None]:
        """Yield as `taken` of the stream; `only_whole`: once, when all has ended."""
        task = asyncio.create_task(self._fill(), name="watch for stop strings")
        task.add_done_callback(lambda _: self._has_come.set())
        try:
            while not task.done() or self._parts:
                if not self._parts:
                    go_on()
                await (asyncio.wait({task}) if only_whole else self._has_come.wait())
                self._has_come.clear()
                if self._parts:
                    scores, self._scores = self._scores, []
                    parts, self._parts = self._parts, []
                    yield Delivery(merge(parts), scores, self._version)
            await task  # for what it may have raised
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _fill(self) -> None:
        while self._stream.unfinished:
            await self._stream.wait()
            delivery = self._stream.take()
            if stopped := self._watch.stopped(delivery.news):
                self._stream.stop(np.array(stopped))
            self._scores += delivery.scores
            self._parts.append(delivery.news)
            self._version = delivery.weights_version
            if len(self._parts) > _MOST_PARTS:
                self._parts = [merge(self._parts)]
            self._has_come.set()


_UNKNOWN, CLEAN, _SUSPICIOUS = range(3)
"""Kinds of tokens. No stop string begins in a CLEAN one or is complete there, unless it had begun
before."""


@lru_cache(maxsize=64)
def _kinds_of(table: ByteTable, _stops: tuple[bytes, ...]) -> bytearray:
    """Return the kinds of tokens beside these stop strings, which all who look for them learn."""
    return bytearray(len(table.entries))


class StopStringWatch:
    """Finds stop strings in completions that are asked for together."""

    def __init__(self, table: ByteTable, stops: StopStrings, num_choices: int) -> None:
        self._table = table
        self._stops = stops
        self.kinds = _kinds_of(table, stops.all)
        """By token."""
        self._kinds: U8 = np.frombuffer(self.kinds, np.uint8)
        self._has_begun = np.zeros(num_choices, np.bool_)
        self._begun: dict[int, bytes] = {}  # beginnings of stop strings that texts end in

    def stopped(self, news: TokenDeltas) -> list[int]:
        """Return the completions that have now reached a stop string, but for those that the engine
        has ended."""
        kinds = self._kinds[news.token_ids]
        if not kinds.all():
            for token in np.unique(news.token_ids[kinds == _UNKNOWN]).tolist():
                self._learn(token)
            kinds = self._kinds[news.token_ids]
        suspicious = np.zeros(len(kinds) + 1, np.int64)
        np.cumsum(kinds == _SUSPICIOUS, out=suspicious[1:])
        is_near = suspicious[news.offsets[1:]] > suspicious[news.offsets[:-1]]
        is_near = (is_near | self._has_begun[news.indices]) & (news.reasons == 0)
        return [
            index
            for entry in np.flatnonzero(is_near).tolist()
            if self._has_stopped(index := int(news.indices[entry]), news.tokens_of(entry))
        ]

    def stops(self, index: int, token: int) -> bool:
        """Return whether a completion, which runs, reaches a stop string with this token."""
        if self.kinds[token] == _UNKNOWN:
            self._learn(token)
        is_near = self.kinds[token] == _SUSPICIOUS or self._has_begun[index]
        return bool(is_near) and self._has_stopped(index, token.to_bytes(4, "little"))

    def _learn(self, token: int) -> None:
        data = self._table.entries[token]
        is_near = self._stops.search(data) is not None or self._stops.undecided(data) > 0
        self.kinds[token] = _SUSPICIOUS if is_near else CLEAN

    def _has_stopped(self, index: int, token_ids: bytes) -> bool:
        data = self._begun.pop(index, b"") + self._table.join(token_ids)
        if self._stops.search(data) is not None:
            self._has_begun[index] = False
            return True
        undecided = self._stops.undecided(data)
        self._has_begun[index] = undecided > 0
        if undecided:
            self._begun[index] = data[-undecided:]
        return False
