"""EventWriter: events of one token, written to all connections in one pass a step.

A stream of one completion that is nothing but text goes on here once its first event is sent. Its
task sleeps until something comes that is not the text of a whole token: an end, part of a
character, other weights; or while its client reads too slowly, which gets fewer, larger events.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from engine.client.client import EngineClient
from engine.client.streams import Stream
from server import metrics
from server.generation.rendering import Pieces


class ChunkedReply(Protocol):
    """A reply that has begun, and whose body is sent in chunks of HTTP."""

    on_pause: Callable[[], None]
    """Called when the client has read too little of it."""

    @property
    def is_paused(self) -> bool:
        """Whether the client has read too little of it, and not yet more."""

    def write(self, data: bytes) -> None:
        """Send bytes as they are."""
        ...


class Outlet:
    """Where one stream's events go."""

    def __init__(self, started: float) -> None:
        self.reply: ChunkedReply | None = None
        """None while only the stream's task may write."""
        self.begin = self.end = b""
        """What an event has around its text; empty where only the stream's task makes them."""
        self.last = started
        """When the last event was written, or the request began."""
        self.num_tokens = 0
        """Tokens that were written here."""


class EventWriter:
    """Writes for one API process."""

    def __init__(self, client: EngineClient, pieces: Pieces) -> None:
        self._pieces = pieces
        self._outlets: dict[int, Outlet] = {}
        client.hand_out(pieces.is_whole, self.write)

    async def wait(self, stream: Stream, outlet: Outlet, last_token: int) -> None:
        """Write what comes of a stream, whose tokens so far end with this one, until there is
        something to take. Raises what `Stream.wait` does."""
        reply = outlet.reply
        is_text = outlet.begin and self._pieces.is_whole[last_token]
        if reply is None or reply.is_paused or not is_text:
            await stream.wait()
            return
        self._outlets[stream.direct_number] = outlet
        reply.on_pause = lambda: stream.set_direct(False)
        stream.set_direct(True)
        try:
            await stream.wait()
        finally:
            stream.set_direct(False)
            reply.on_pause = _do_nothing
            del self._outlets[stream.direct_number]

    def write(self, numbers: npt.NDArray[np.int64], tokens: npt.NDArray[np.int32]) -> None:
        """Write one token to each of these streams."""
        now, outlets, gaps = time.monotonic(), self._outlets, []
        texts = self._pieces.json[tokens].tolist()
        for number, text in zip(numbers.tolist(), texts, strict=True):
            outlet = outlets[number]
            begin, end = outlet.begin, outlet.end
            size = len(begin) + len(text) + len(end)
            outlet.reply.write(b"%x\r\n%b%b%b\r\n" % (size, begin, text, end))  # type: ignore[union-attr]  # see `wait`
            outlet.num_tokens += 1
            gaps.append(now - outlet.last)
            outlet.last = now
        metrics.observe_all(metrics.INTER_TOKEN_LATENCY, np.array(gaps))


def _do_nothing() -> None:
    pass
