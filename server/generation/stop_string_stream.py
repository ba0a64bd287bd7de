"""What a request's stream has new, with an eye on stop strings where there are any.

A stop string is looked for as soon as tokens are there, whether or not somebody reads them, since a
completion that has reached one is to free its slot; the tokens wait here then, as arrays. Without
stop strings they wait in the engine client's table. Knows no text but through a Watch.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import numpy as np

from engine.client.streams import Delivery, Stream
from engine.messages import Output
from engine.steps.token_deltas import News, merge
from server.generation.stop_strings import Watch

_MOST_PARTS = 64
"""Parts that wait side by side; more of them are made one."""


async def taken(stream: Stream, only_ended: bool = False) -> AsyncGenerator[Delivery, None]:
    """What is new since the last time, until all has ended; `only_ended` as in `Stream.take`.

    Raises as `Stream.wait`.
    """
    while stream.unfinished:
        await stream.wait()
        yield stream.take(only_ended)


class Backlog:
    """What came of a watched stream and was not asked for yet."""

    def __init__(self, stream: Stream, watch: Watch) -> None:
        self._stream = stream
        self._watch = watch
        self._outputs: list[tuple[int, Output]] = []
        self._parts: list[News] = []
        self._version = 0
        self._has_come = asyncio.Event()

    async def taken(self, only_whole: bool) -> AsyncGenerator[Delivery, None]:
        """As `taken` of the stream; `only_whole`: once, when all has ended."""
        task = asyncio.create_task(self._fill(), name="watch for stop strings")
        task.add_done_callback(lambda _: self._has_come.set())
        try:
            while not task.done() or self._parts:
                await (asyncio.wait({task}) if only_whole else self._has_come.wait())
                self._has_come.clear()
                if self._parts:
                    outputs, self._outputs = self._outputs, []
                    parts, self._parts = self._parts, []
                    yield Delivery(outputs, merge(parts), self._version)
            await task  # for what it may have raised
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _fill(self) -> None:
        while self._stream.unfinished:
            await self._stream.wait()
            delivery = self._stream.take()
            stopped = self._watch.stopped(delivery, self._stream.n)
            if len(stopped):
                self._stream.stop(np.array(stopped))
            self._outputs += delivery.outputs
            self._parts.append(delivery.news)
            self._version = delivery.weights_version
            if len(self._parts) > _MOST_PARTS:
                self._parts = [merge(self._parts)]
            self._has_come.set()
