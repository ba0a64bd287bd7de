"""StreamWriter: events of new tokens, written to all connections in one pass.

A stream of few choices goes on here once its first event is sent. Its task sleeps until a choice
ends, the weights change or the client reads too slowly; then it sends fewer, larger events itself.
A choice's tokens of all steps that came together are one event. Most cost a look-up; what is more
than text of whole characters, its renderer encodes.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np

from srm.engine.client.client import EngineClient
from srm.engine.client.streams import STOP, Stream
from srm.engine.steps.tokens import Tokens, join_steps
from srm.server import metrics
from srm.server.reply.format import EventTemplate, escape
from srm.server.reply.renderer import Pieces, Renderer
from srm.server.reply.scores import Columns, ScoreWriter
from srm.server.text.stream import TextStream

log = logging.getLogger(__name__)


class StreamConnection(Protocol):
    """The connection of a reply that has begun, and whose body is sent in chunks of HTTP."""

    @property
    def is_paused(self) -> bool:
        """Whether the client has read too little of it, and not yet more."""

    def write(self, data: bytes) -> bool:
        """Send bytes as they are; return whether more may be."""
        ...


class Outlet:
    """Where the events of one request go."""

    def __init__(self, renderer: Renderer) -> None:
        self.renderer = renderer
        self.connection: StreamConnection | None = None
        """None while only the request's task may send them."""
        self.has_begun = False
        """Whether an event was sent."""
        self.is_quiet = False
        """Whether its task is to say that there is nothing to send."""
        self.last_sent = renderer.generation.started
        """When the last event was, or the request began; seconds of `time.monotonic`."""

    @property
    def stream(self) -> Stream:
        """The stream whose events they are."""
        stream = self.renderer.generation.stream
        assert stream is not None
        return stream


class _Choice:
    """A choice whose events may be written here."""

    __slots__ = (
        *("detokenizer", "finder", "index", "is_over", "num_top", "outlet", "scores"),
        *("template", "text"),
    )

    template: EventTemplate | None
    text: TextStream
    """Set where there is a template."""

    def __init__(self, outlet: Outlet, index: int) -> None:
        self.outlet = outlet
        self.detokenizer = outlet.renderer.generation.detokenizer
        self.finder = self.detokenizer.finder
        self.index = index
        self.is_over = False
        """Whether a stop string or an error ended it; more of it may have come meanwhile."""
        self.num_top = outlet.stream.num_top
        form = outlet.renderer.form
        self.scores = None if form.request.logprobs is None else form.scores
        self.renew()

    def renew(self) -> None:
        """Make the template that its next event has."""
        self.template = self.outlet.renderer.template(self.index)
        if (text := self.detokenizer.streams.get(self.index)) is not None:
            self.text = text


class StreamWriter:
    """Writes for one API process."""

    def __init__(self, client: EngineClient, pieces: Pieces) -> None:
        self._pieces = pieces
        self._choices: dict[int, _Choice] = {}  # by stream number
        client.set_writer(self.write)

    def offer(self, outlet: Outlet) -> None:
        """Write what comes next of a stream, if its task has sent all before it, of which its
        client has read enough."""
        connection, num_unsent = outlet.connection, outlet.renderer.generation.num_ahead
        if not outlet.has_begun or num_unsent or connection is None or connection.is_paused:
            return
        if outlet.stream.hand_out():
            for index, number in enumerate(outlet.stream.numbers):
                self._choices[number] = _Choice(outlet, index)

    @contextmanager
    def writing(self, outlet: Outlet) -> Iterator[None]:
        """A block in which a stream may be offered, which is over behind it."""
        try:
            yield
        finally:
            if (stream := outlet.renderer.generation.stream) is not None:
                for number in stream.numbers:
                    self._choices.pop(number, None)

    def write(self, steps: Sequence[Tokens]) -> None:
        """Write the new tokens of these streams in steps that came together: an event for each
        choice, whose stream's events are sent together."""
        tokens = join_steps(steps)
        choices, sizes = self._choices, self._pieces.num_characters
        token_ids = tokens.token_ids.tolist()
        texts = self._texts(tokens)
        all_scores = self._scores(tokens, texts) if len(tokens.logprobs) else {}
        written: dict[Outlet, bytes] = {}
        for at, (number, begin, end, _) in enumerate(tokens.rows()):
            choice, text = choices[number], texts[at]
            outlet, finder, template = choice.outlet, choice.finder, choice.template
            scores = all_scores.get(at, b"")
            if choice.is_over:
                continue
            try:
                is_plain = False
                if template is None or scores is None:
                    template, scores = None, b""
                elif text and not choice.text.is_pending:
                    is_plain = finder is None or finder.are_clean(token_ids[begin:end])
                if is_plain:
                    if scores:
                        choice.text.num_characters += (
                            sizes[token_ids[begin]]
                            if end - begin == 1
                            else sum(sizes[token] for token in token_ids[begin:end])
                        )
                elif finder and (stop := finder.add_all(choice.index, token_ids[begin:end])):
                    row = _row(tokens, begin, begin + stop, choice, STOP)
                    template, events = None, outlet.renderer.events(row)
                    outlet.stream.stop(np.array([choice.index]))
                    choice.is_over = True
                elif template is None:
                    events = outlet.renderer.events(_row(tokens, begin, end, choice))
                    choice.renew()
                else:
                    text = escape(choice.text.add_few(token_ids[begin:end]))
                    if scores:
                        choice.text.offsets(tokens.token_ids[begin:end].tobytes())
                if template is not None:
                    before_text, before_scores, behind, has_counts = template
                    choice.detokenizer.num_tokens += end - begin
                    if not (text or scores):
                        continue
                    if has_counts:
                        behind %= outlet.renderer.numbers(text, scores)
                    events = b"%b%b%b%b%b" % (before_text, text, before_scores, scores, behind)
            except Exception as error:  # noqa: BLE001 - its task logs it
                outlet.stream.fail(error)
                choice.is_over = True
                continue
            if events:
                written[outlet] = written[outlet] + events if outlet in written else events
        _send(written)

    def _texts(self, tokens: Tokens) -> list[bytes]:
        """Return the text of each row, as JSON; empty where some of it is not whole characters."""
        texts: list[bytes] = self._pieces.json[tokens.token_ids].tolist()
        if len(texts) == len(tokens):
            return texts
        rows = (texts[begin:end] for _, begin, end, _ in tokens.rows())
        return [b"".join(row) if all(row) else b"" for row in rows]

    def _scores(self, tokens: Tokens, texts: list[bytes]) -> dict[int, bytes | None]:
        """Return the scores, as JSON, of rows of streams that ask for some; None where they could
        not be rendered together with others."""
        alike: defaultdict[tuple[ScoreWriter, int], tuple[list[int], list[int]]]
        alike = defaultdict(lambda: ([], []))  # rows, and characters before each of their tokens
        entries: dict[int, bytes | None] = {}
        sizes = self._pieces.num_characters
        token_ids = tokens.token_ids.tolist()
        for at, (number, begin, end, _) in enumerate(tokens.rows()):
            choice = self._choices[number]
            if choice.template is None or choice.scores is None:
                continue
            is_one = end - begin == 1
            if not is_one and (choice.text.is_pending or not texts[at]):
                entries[at] = None
                continue
            rows, offsets = alike[choice.scores, choice.num_top]
            rows.append(at)
            offsets.append(choice.text.num_characters)
            if not is_one:
                for token in token_ids[begin : end - 1]:
                    offsets.append(offsets[-1] + sizes[token])
        for (scores, num_top), (rows, offsets) in alike.items():
            is_own = np.zeros(len(tokens), np.bool_)
            is_own[rows] = True
            own = tokens if is_own.all() else tokens.select(is_own)
            columns: Columns = own.token_ids.tolist(), own.logprobs.tolist(), [], []
            if num_top:
                top = own.top_ids[:, :num_top], own.top_logprobs[:, :num_top]
                columns = *columns[:2], top[0].ravel().tolist(), top[1].ravel().tolist()
            rendered: list[bytes | None]
            try:
                rendered = [*scores.render_each(columns, offsets, np.diff(own.offsets).tolist())]
            except Exception:  # whose it is shows when each row is rendered alone
                log.exception("scores could not be rendered together")
                rendered = [None] * len(rows)
            entries.update(zip(rows, rendered, strict=True))
        return entries


def _send(written: dict[Outlet, bytes]) -> None:
    """Send each stream's events as one chunk of HTTP. An error ends its request alone."""
    now, waited = time.monotonic(), []
    for outlet, events in written.items():
        waited.append(now - outlet.last_sent)
        outlet.last_sent = now
        chunk = b"%x\r\n%b\r\n" % (len(events), events)
        try:
            if not outlet.connection.write(chunk):  # type: ignore[union-attr]  # see `writing`
                outlet.stream.keep()
        except Exception as error:  # noqa: BLE001 - its task logs it
            outlet.stream.fail(error)
    # As many calls of `observe` would do, all at once.
    histogram = metrics.INTER_TOKEN_LATENCY
    places = np.searchsorted(histogram._upper_bounds, waited)
    for bucket, count in enumerate(np.bincount(places).tolist()):
        if count:
            histogram._buckets[bucket].inc(count)
    histogram._sum.inc(sum(waited))


def _row(tokens: Tokens, begin: int, end: int, choice: _Choice, reason: int = 0) -> Tokens:
    """Return these tokens of a choice, which ends if there is a reason."""
    own = slice(begin, end)
    return Tokens(
        *(np.array([choice.index]), np.array([0, end - begin]), tokens.token_ids[own]),
        *(np.array([reason], np.uint8), tokens.logprobs[own]),
        *(tokens.top_ids[own, : choice.num_top], tokens.top_logprobs[own, : choice.num_top]),
    )
