"""EventWriter: events of one token, written to all connections in one pass a step.

A stream of few choices goes on here once its first event is sent. Its task sleeps until a choice
ends or the weights change; or while its client reads too slowly, which gets fewer, larger events.
Most tokens cost a look-up; what is more than the text of whole characters, its request renders.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import numpy as np

from engine.client.client import EngineClient
from engine.client.streams import Stream
from engine.client.token_table import StepRows
from engine.steps.token_deltas import CompletionTokens
from server import metrics
from server.generation.rendering import Pieces, escaped
from server.generation.stop_strings import CLEAN, do_nothing
from server.text.sample import Sample
from server.text.score_columns import ScoreColumns

log = logging.getLogger(__name__)


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

    def around(self, index: int) -> Around | None:
        """Return what an event has around a token's text and scores, if it says no more now."""
        ...


class Around(NamedTuple):
    """The bytes of a one-token event around its text and scores, which are looked up."""

    begin: bytes
    end: bytes
    sample: Sample
    scores: ScoreColumns | None = None
    """None: it has no scores."""
    before_scores: bytes = b""
    counts: Callable[[], tuple[int, int]] | None = None
    """Returns the values formatted into `end`, if there are any: tokens so far, with and without
    prompts."""


class Outlet:
    """Destination of the events of one request."""

    def __init__(self, started: float) -> None:
        self.reply: ChunkedReply | None = None
        """None while only the request's task may write."""
        self.rendering: Rendering | None = None
        """None before the first event."""
        self.kinds: bytearray | None = None
        """Per token, CLEAN where its text is sent as it is; None: that holds for all tokens."""
        self.last = started
        """Time at which the last event was written, or the request began."""
        self.num_tokens = 0
        """Tokens that were written here without being rendered."""
        self.stream: Stream | None = None
        """The stream whose events they are, while EventWriter may write them."""

    def fail(self, error: Exception) -> None:
        """End the request with an unforeseen error, which its task logs: the bug that one request
        meets is not to silence the others of the process."""
        if self.stream is not None:
            self.stream.set_direct(False)
            self.stream.fail(error)


class _Line:
    """Destination of the events of one choice."""

    __slots__ = ("around", "index", "kinds", "num_top", "outlet")

    def __init__(self, outlet: Outlet, index: int, num_top: int, kinds: bytes | bytearray) -> None:
        self.outlet = outlet
        self.index = index
        self.num_top = num_top
        self.kinds = kinds
        self.around: Around | None = None


class EventWriter:
    """Writes for one API process."""

    def __init__(self, client: EngineClient, pieces: Pieces) -> None:
        self._pieces = pieces
        self._lines: dict[int, _Line] = {}  # by number of their streams
        self._all_clean = bytes([CLEAN]) * len(pieces.json)
        client.hand_out(self.write)

    @contextmanager
    def writing(self, stream: Stream, outlet: Outlet) -> Iterator[Callable[[], None]]:
        """Have a stream's events written here. What this yields is called whenever all that came of
        the stream is sent, and nobody but the writer has to make events until it has news."""
        lines = {
            number: _Line(outlet, index, stream.num_top, outlet.kinds or self._all_clean)
            for index, number in enumerate(stream.numbers)
        }

        def pause() -> None:
            stream.set_direct(False)

        def go_on() -> None:
            if outlet.rendering is None or outlet.reply is None or outlet.reply.is_paused:
                return
            for line in lines.values():
                line.around = outlet.rendering.around(line.index)
            outlet.reply.on_pause = pause
            stream.set_direct(True)

        self._lines.update(lines)
        outlet.stream = stream
        try:
            yield go_on
        finally:
            outlet.stream = None
            stream.set_direct(False)  # nobody writes what would be handed out
            for number in lines:
                del self._lines[number]
            if outlet.reply is not None:
                outlet.reply.on_pause = do_nothing

    def write(self, rows: StepRows) -> None:
        """Write the events of one token for each of these streams."""
        lines, tokens = self._lines, rows.tokens.tolist()
        texts = self._pieces.json[rows.tokens].tolist()
        scores = self._scores(rows) if len(rows.logprobs) else {}
        said: dict[Outlet, bytes] = {}
        for at, number in enumerate(rows.streams.tolist()):
            line, text, token = lines[number], texts[at], tokens[at]
            outlet, around, score = line.outlet, line.around, scores.get(at, b"")
            try:
                if around and line.kinds[token] == CLEAN and score is not None:
                    begin, end, sample, _, before_score, counts = around
                    outlet.num_tokens += 1
                    if counts is not None:
                        end %= counts()
                    if not text or sample.is_cut:
                        text = escaped(sample.text_of(token))
                        if not (text or score):
                            continue
                    elif score:
                        sample.pass_on(token)
                    events = b"%b%b%b%b%b" % (begin, text, before_score, score, end)
                else:
                    new = _completion_tokens(rows, at, line.num_top)
                    events = outlet.rendering.render(line.index, new)  # type: ignore[union-attr]  # see `writing`
                    line.around = outlet.rendering.around(line.index)  # type: ignore[union-attr]
            except Exception as error:  # noqa: BLE001 - its task logs it
                outlet.fail(error)
                continue
            if events:
                said[outlet] = said[outlet] + events if outlet in said else events
        now = time.monotonic()
        for outlet, events in said.items():
            try:
                outlet.reply.write(b"%x\r\n%b\r\n" % (len(events), events))  # type: ignore[union-attr]  # see `writing`
            except Exception as error:  # noqa: BLE001 - its task logs it
                outlet.fail(error)
        metrics.observe_all(
            metrics.INTER_TOKEN_LATENCY, np.array([now - outlet.last for outlet in said])
        )
        for outlet in said:
            outlet.last = now

    def _scores(self, rows: StepRows) -> dict[int, bytes | None]:
        """Return the scores, as JSON, of rows that have some and may need no more than a look-up;
        None where they do."""
        alike: defaultdict[tuple[ScoreColumns, int], dict[int, int]] = defaultdict(dict)
        for at, number in enumerate(rows.streams.tolist()):
            line = self._lines[number]
            if line.around and line.around.scores:
                alike[line.around.scores, line.num_top][at] = line.around.sample.num_characters
        found: dict[int, bytes | None] = {}
        for (scores, num_top), offsets in alike.items():
            own = np.array([*offsets])
            tops = rows.alternatives(own, num_top)
            try:
                told = scores.render(rows.tokens[own], rows.logprobs[own], *tops, offsets.values())
            except Exception:  # whose it is shows when each row is rendered alone
                log.exception("scores could not be rendered together")
                told = [None] * len(own)
            found.update(zip(offsets, told, strict=True))
        return found


def _completion_tokens(rows: StepRows, at: int, num_top: int) -> CompletionTokens:
    own = slice(at, at + 1)
    return CompletionTokens(
        *(rows.tokens[own].tobytes(), rows.logprobs[own].tobytes()),
        *(rows.top_ids[own, :num_top].tobytes(), rows.top_logprobs[own, :num_top].tobytes()),
        None,
    )
