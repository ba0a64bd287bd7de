"""StreamWriter: events of one token, written to all connections in one pass a step.

A stream of few choices goes on here once its first event is sent. Its task sleeps until a choice
ends, the weights change or the client reads too slowly; then it sends fewer, larger events itself.
Most tokens cost a look-up; what is more than text of whole characters, its renderer encodes.
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
from srm.engine.steps.tokens import Tokens, step_tokens
from srm.server import metrics
from srm.server.reply.format import EventTemplate, escape
from srm.server.reply.renderer import Pieces, Renderer
from srm.server.reply.scores import Columns, ScoreWriter
from srm.server.text.stream import CLEAN, TextStream

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
        *("detokenizer", "finder", "index", "is_over", "kinds", "num_top", "outlet", "scores"),
        *("template", "text"),
    )

    template: EventTemplate | None
    text: TextStream
    """Set where there is a template."""

    def __init__(self, outlet: Outlet, index: int, num_top: int, all_clean: bytes) -> None:
        self.outlet = outlet
        self.detokenizer = outlet.renderer.generation.detokenizer
        self.finder = self.detokenizer.finder
        self.kinds = all_clean if self.finder is None else self.finder.kinds
        self.index = index
        self.is_over = False
        """Whether a stop string or an error ended it; more of it may have come meanwhile."""
        self.num_top = num_top
        form = outlet.renderer.form
        self.scores = None if form.request.logprobs is None else form.scores
        self.template = None

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
        self._all_clean = bytes([CLEAN]) * len(pieces.json)
        self._num_scored = 0  # streams that ask for scores
        client.set_writer(self.write)

    @contextmanager
    def writing(self, outlet: Outlet, stream: Stream) -> Iterator[None]:
        """Have a stream's events written here while its task waits for more."""
        choices = {
            number: _Choice(outlet, index, stream.num_top, self._all_clean)
            for index, number in enumerate(stream.numbers)
        }

        def may_write() -> bool:
            connection = outlet.connection
            if not outlet.has_begun or connection is None or connection.is_paused:
                return False
            for choice in choices.values():
                choice.renew()
            return True

        self._choices.update(choices)
        is_scored = outlet.renderer.form.request.logprobs is not None
        self._num_scored += is_scored
        stream.may_hand_out = may_write
        try:
            yield
        finally:
            self._num_scored -= is_scored
            for number in choices:
                del self._choices[number]

    def write(self, steps: Sequence[Tokens]) -> None:
        """Write the events of one token for each of these streams, of several steps; a stream's are
        sent together, unless some have scores, which need the text before them."""
        if len(steps) > 1 and not self._num_scored:
            columns = zip(
                *((tokens.owners, tokens.token_ids, tokens.reasons) for tokens in steps),
                strict=True,
            )
            steps = [step_tokens(*map(np.concatenate, columns))]
        for tokens in steps:
            self._write_rows(tokens)

    def _write_rows(self, tokens: Tokens) -> None:
        choices, token_ids = self._choices, tokens.token_ids.tolist()
        num_characters = self._pieces.num_characters
        texts = self._pieces.json[tokens.token_ids].tolist()
        all_scores = self._scores(tokens) if len(tokens.logprobs) else {}
        written: dict[Outlet, bytes] = {}
        for at, number in enumerate(tokens.owners.tolist()):
            choice, text, token = choices[number], texts[at], token_ids[at]
            outlet, scores, template = choice.outlet, all_scores.get(at, b""), choice.template
            if choice.is_over:
                continue
            try:
                if template is None or scores is None:
                    template, scores, is_plain = None, b"", False
                else:
                    is_plain = text and not choice.text.is_pending and choice.kinds[token] == CLEAN
                if is_plain:
                    if scores:
                        choice.text.num_characters += num_characters[token]
                elif choice.finder and choice.finder.add(choice.index, token):
                    template, events = None, outlet.renderer.events(_row(tokens, at, choice, STOP))
                    outlet.stream.stop(np.array([choice.index]))
                    choice.is_over = True
                elif template is None:
                    events = outlet.renderer.events(_row(tokens, at, choice))
                    choice.renew()
                else:
                    text = escape(choice.text.add_token(token))
                    if scores:
                        choice.text.offsets(token.to_bytes(4, "little"))
                if template is not None:
                    begin, before_scores, end, has_counts = template
                    choice.detokenizer.num_tokens += 1
                    if not (text or scores):
                        continue
                    if has_counts:
                        end %= outlet.renderer.numbers(text, scores)
                    events = b"%b%b%b%b%b" % (begin, text, before_scores, scores, end)
            except Exception as error:  # noqa: BLE001 - its task logs it
                outlet.stream.fail(error)
                choice.is_over = True
                continue
            if events:
                written[outlet] = written[outlet] + events if outlet in written else events
        _send(written)

    def _scores(self, tokens: Tokens) -> dict[int, bytes | None]:
        """Return the scores, as JSON, of rows of streams that ask for some; None where they could
        not be rendered together with others."""
        alike: defaultdict[tuple[ScoreWriter, int], dict[int, int]] = defaultdict(dict)
        for at, number in enumerate(tokens.owners.tolist()):
            choice = self._choices[number]
            if choice.template is not None and choice.scores is not None:
                alike[choice.scores, choice.num_top][at] = choice.text.num_characters
        entries: dict[int, bytes | None] = {}
        for (scores, num_top), offsets in alike.items():
            own = np.array([*offsets])
            columns: Columns = tokens.token_ids[own].tolist(), tokens.logprobs[own].tolist(), [], []
            if num_top:
                top = tokens.top_ids[own, :num_top], tokens.top_logprobs[own, :num_top]
                columns = *columns[:2], top[0].ravel().tolist(), top[1].ravel().tolist()
            rendered: list[bytes | None]
            try:
                rendered = [*scores.render_each(columns, offsets.values())]
            except Exception:  # whose it is shows when each row is rendered alone
                log.exception("scores could not be rendered together")
                rendered = [None] * len(own)
            entries.update(zip(offsets, rendered, strict=True))
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


def _row(tokens: Tokens, at: int, choice: _Choice, reason: int = 0) -> Tokens:
    """Return the row of one choice, which ends if there is a reason."""
    own = slice(at, at + 1)
    return step_tokens(
        *(np.array([choice.index]), tokens.token_ids[own], np.array([reason], np.uint8)),
        tokens.logprobs[own],
        *(tokens.top_ids[own, : choice.num_top], tokens.top_logprobs[own, : choice.num_top]),
    )
