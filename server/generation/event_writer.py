"""EventWriter: events of one token, written to all connections in one pass a step.

A stream of few choices goes on here once its first event is sent. Its task sleeps until a choice
ends or the weights change; or while its client reads too slowly, which gets fewer, larger events.
Most tokens cost a look-up; what is more than the text of whole characters, its request renders.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import numpy as np

from engine.client.client import EngineClient
from engine.client.streams import Stream
from engine.client.token_table import StepRows
from engine.steps.token_deltas import CompletionTokens
from server import metrics
from server.generation.rendering import Pieces
from server.generation.stop_strings import CLEAN, do_nothing


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


class Rendering(Protocol):
    """Makes the events of one request, the first of which is sent."""

    def render(self, index: int, new: CompletionTokens) -> bytes:
        """Return the events for what is new of a choice; none if it adds nothing yet."""
        ...

    def around(self, index: int) -> tuple[bytes, bytes] | None:
        """Return what an event has around the text of a choice, if that is all it says now."""
        ...


class Outlet:
    """Where the events of one request go."""

    def __init__(self, started: float) -> None:
        self.reply: ChunkedReply | None = None
        """None while only the request's task may write."""
        self.rendering: Rendering | None = None
        """None before the first event."""
        self.kinds: bytearray | None = None
        """By token: CLEAN where its text is sent as it is; None: that is so of all."""
        self.last = started
        """When the last event was written, or the request began."""
        self.num_tokens = 0
        """Tokens that were written here without being rendered."""


class _Line:
    """Where the events of one choice go."""

    __slots__ = ("begin", "end", "index", "kinds", "outlet")

    def __init__(self, outlet: Outlet, index: int) -> None:
        self.outlet = outlet
        self.index = index
        self.begin = self.end = b""
        self.kinds: bytes | bytearray = b""


class EventWriter:
    """Writes for one API process."""

    def __init__(self, client: EngineClient, pieces: Pieces) -> None:
        self._pieces = pieces
        self._lines: dict[int, _Line] = {}  # by number of their streams
        self._all_clean, self._none_clean = (
            bytes([CLEAN]) * len(pieces.json),
            bytes(len(pieces.json)),
        )
        client.hand_out(self.write)

    @contextmanager
    def writing(self, stream: Stream, outlet: Outlet) -> Iterator[Callable[[], None]]:
        """Have a stream's events written here. What this yields is called whenever all that came of
        the stream is sent, and nobody but the writer has to make events until it has news."""
        lines = {number: _Line(outlet, index) for index, number in enumerate(stream.numbers)}

        def pause() -> None:
            stream.set_direct(False)

        def go_on() -> None:
            if outlet.rendering is None or outlet.reply is None or outlet.reply.is_paused:
                return
            for line in lines.values():
                self._settle(line)
            outlet.reply.on_pause = pause
            stream.set_direct(True)

        self._lines.update(lines)
        try:
            yield go_on
        finally:
            for number in lines:
                del self._lines[number]
            if outlet.reply is not None:
                outlet.reply.on_pause = do_nothing

    def write(self, rows: StepRows) -> None:
        """Write the events of one token for each of these streams."""
        lines, tokens = self._lines, rows.tokens.tolist()
        texts = self._pieces.json[rows.tokens].tolist()
        said: dict[Outlet, bytes] = {}
        for at, number in enumerate(rows.streams.tolist()):
            line, text, token = lines[number], texts[at], tokens[at]
            outlet = line.outlet
            if text and line.kinds[token] == CLEAN:
                events = b"%b%b%b" % (line.begin, text, line.end)
                outlet.num_tokens += 1
            else:
                events = outlet.rendering.render(line.index, _completion_tokens(rows, at))  # type: ignore[union-attr]  # see `writing`
                self._settle(line)
            if events:
                said[outlet] = said[outlet] + events if outlet in said else events
        now = time.monotonic()
        for outlet, events in said.items():
            outlet.reply.write(b"%x\r\n%b\r\n" % (len(events), events))  # type: ignore[union-attr]  # see `writing`
        metrics.observe_all(
            metrics.INTER_TOKEN_LATENCY, np.array([now - outlet.last for outlet in said])
        )
        for outlet in said:
            outlet.last = now

    def _settle(self, line: _Line) -> None:
        """Note what events of a choice have around their text, if text is all that they say."""
        around = line.outlet.rendering.around(line.index)  # type: ignore[union-attr]  # see `writing`
        if around is None:
            line.kinds = self._none_clean
        else:
            line.begin, line.end = around
            line.kinds = line.outlet.kinds or self._all_clean


def _completion_tokens(rows: StepRows, at: int) -> CompletionTokens:
    logprobs = rows.logprobs[at : at + 1].tobytes()
    return CompletionTokens(rows.tokens[at].tobytes(), logprobs, b"", b"", None)
