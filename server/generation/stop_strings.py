"""Finds stop strings in completions as soon as their tokens arrive, so that slots come free.

A stream with stop strings is read whether or not somebody takes its tokens, which wait here; one
without leaves them in the engine client's table. `StopStringWatch` searches only completions with
a new token that has a stop string or the beginning of one in it, which is cached per token, or
whose text ended in such a beginning: the others cost a look-up in an array. Keeps no text but what
may be the beginning of a stop string.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable

import numpy as np
import numpy.typing as npt

from engine.client.streams import Delivery, Stream
from engine.messages import Output
from engine.steps.tokens import U8, Tokens, join
from server.text.stream import NEAR, UNKNOWN, StopStrings
from server.text.text import ByteTable

_MOST_PARTS = 64
"""Most parts that wait unmerged."""


def do_nothing() -> None:
    """Take the place of a `go_on`."""


async def read(
    stream: Stream, go_on: Callable[[], None] = do_nothing, only_ended: bool = False
) -> AsyncGenerator[Delivery, None]:
    """Yield what is new, until all has ended; `only_ended` as in `Stream.read_new`.

    `go_on` is called whenever all that was yielded is dealt with. Raises as `Stream.wait`.
    """
    while stream.unfinished:
        go_on()
        await stream.wait()
        yield stream.read_new(only_ended)


class StopStringStream:
    """Ends a stream's completions at stop strings, and keeps what was not asked for yet."""

    def __init__(
        self,
        stream: Stream,
        watch: StopStringWatch,
        beginnings: Callable[[], Iterable[tuple[int, bytes]]],
    ) -> None:
        """`beginnings` says what the text of each completion ends in of a stop string, where others
        have fed it tokens that did not come here."""
        self._stream = stream
        self._watch = watch
        self._beginnings = beginnings
        self._goes_on_elsewhere = False
        self._scores: list[tuple[int, Output]] = []
        self._parts: list[Tokens] = []
        self._version = 0
        self._has_come = asyncio.Event()

    async def read(
        self, go_on: Callable[[], None], only_whole: bool
    ) -> AsyncGenerator[Delivery, None]:
        """Yield as `read` of the stream; `only_whole`: once, when all has ended."""
        task = asyncio.create_task(self._fill(), name="watch for stop strings")
        task.add_done_callback(lambda _: self._has_come.set())
        try:
            while not task.done() or self._parts:
                if not self._parts:
                    go_on()
                    self._goes_on_elsewhere = go_on is not do_nothing
                await (asyncio.wait({task}) if only_whole else self._has_come.wait())
                self._has_come.clear()
                if self._parts:
                    scores, self._scores = self._scores, []
                    parts, self._parts = self._parts, []
                    yield Delivery(join(parts), scores, self._version)
            await task  # for what it may have raised
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _fill(self) -> None:
        while self._stream.unfinished:
            await self._stream.wait()
            delivery = self._stream.read_new()
            if self._goes_on_elsewhere:
                self._goes_on_elsewhere = False
                for index, beginning in self._beginnings():
                    self._watch.note(index, beginning)
            if stopped := self._watch.find_stopped(delivery.tokens):
                self._stream.stop(np.array(stopped))
            self._scores += delivery.scores
            self._parts.append(delivery.tokens)
            self._version = delivery.weights_version
            if len(self._parts) > _MOST_PARTS:
                self._parts = [join(self._parts)]
            self._has_come.set()


class StopStringWatch:
    """Finds stop strings in completions that are asked for together."""

    def __init__(self, table: ByteTable, stops: StopStrings, num_choices: int) -> None:
        self._table = table
        self._stops = stops
        self._kinds: U8 = np.frombuffer(stops.kinds, np.uint8)
        self._has_begun = np.zeros(num_choices, np.bool_)
        self._begun: dict[int, bytes] = {}  # beginnings of stop strings that texts end in

    def find_stopped(self, tokens: Tokens) -> list[int]:
        """Return the completions that have now reached a stop string, but for those that the engine
        has ended."""
        self.learn(tokens.token_ids)
        kinds = self._kinds[tokens.token_ids]
        num_near = np.zeros(len(kinds) + 1, np.int64)
        np.cumsum(kinds == NEAR, out=num_near[1:])
        is_near = num_near[tokens.offsets[1:]] > num_near[tokens.offsets[:-1]]
        is_near = (is_near | self._has_begun[tokens.owners]) & (tokens.reasons == 0)
        near = tokens.select(is_near)
        return [
            index
            for index, begin, end, _ in near.rows()
            if self._has_stopped(index, near.token_ids[begin:end].tobytes())
        ]

    def learn(self, token_ids: npt.NDArray[np.int32]) -> None:
        """Find out of which kinds these tokens are."""
        kinds = self._kinds[token_ids]
        if not kinds.all():
            for token in np.unique(token_ids[kinds == UNKNOWN]).tolist():
                self._stops.learn(token)

    def note(self, index: int, beginning: bytes) -> None:
        """Note which beginning of a stop string a completion's text ends in, if any."""
        self._has_begun[index] = bool(beginning)
        self._begun[index] = beginning

    def _has_stopped(self, index: int, token_ids: bytes) -> bool:
        data = self._begun.get(index, b"") + self._table.join(token_ids)
        is_over = self._stops.search(data) is not None
        undecided = 0 if is_over else self._stops.count_undecided(data)
        self.note(index, data[len(data) - undecided :])
        return is_over
