"""Running a generation and answering with it, whole or as a stream.

Handles what completions and chat completions have in common: when something is sent, usage,
metrics. An Encoder encodes it. Knows no fields of requests but those of streams and tokens.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from operator import itemgetter

from msgspec import UNSET, Raw
from starlette.responses import Response

from engine.client.client import EngineClient
from engine.errors import IdInUse, InvalidRequest
from engine.steps.token_deltas import TokenDeltas
from server import metrics
from server.generation.encoding import Encoder, UsageField
from server.generation.event_writer import EventWriter
from server.generation.generation import AT_ONCE, Generation
from server.generation.read_ahead import read_ahead
from server.http.bodies import json_reply
from server.http.request_log import note_completion
from server.http.responses import EventStream, together
from server.text.sample import Delta, join

MOST_ALONE = 16
"""Most choices of a request for which each has events of its own, since many clients read only the
first choice of an event."""


class Responder:
    """Answers the requests of one API process."""

    def __init__(self, client: EngineClient, writer: EventWriter) -> None:
        self._client, self._writer = client, writer
        self._ids_in_use: set[str] = set()

    async def respond(self, encoder: Encoder) -> Response:
        """Return the reply, or a stream whose first event is there.

        Raises what the engine refuses with, and IdInUse if a request of this id is running.
        """
        if not encoder.request.stream:
            return json_reply(await self.whole(encoder))
        events = self._events(encoder)
        return EventStream(await anext(events), events, encoder.generation.outlet)

    async def whole(self, encoder: Encoder) -> bytes:
        """Return the whole reply to a request without `stream`. Raises as `respond`."""
        generation = encoder.generation
        if generation.request.stream:
            raise InvalidRequest("stream must be false here, got true", "stream")
        choices: list[tuple[int, Raw]] = []
        with self._claimed(generation):
            async with aclosing(self._certain(generation)) as parts:
                async for certain in parts:  # encoded part by part, between other requests' turns
                    choices += [(one.index, encoder.whole(one, is_event=False)) for one in certain]
                    await asyncio.sleep(0)
        choices.sort(key=itemgetter(0))
        return encoder.reply([raw for _, raw in choices])

    async def _events(self, encoder: Encoder) -> AsyncGenerator[bytes, None]:
        """Yield the reply as a stream, one or more events at a time.

        Choices with news share an event, except in requests of at most MOST_ALONE choices.
        """
        generation, options = encoder.generation, encoder.request.stream_options
        is_continuous = bool(options and options.continuous_usage_stats)
        usage: UsageField = None if options and options.include_usage else UNSET
        outlet = generation.outlet
        is_direct = generation.is_plain and generation.num_choices == 1 and not is_continuous
        around_text = encoder.around_text() if is_direct else None
        told = 0  # tokens, where usage says them
        is_few = generation.num_choices <= MOST_ALONE
        encoded = _encoding(encoder)

        def events(choices: list[Raw]) -> list[bytes]:
            so_far = generation.usage_of(told) if is_continuous else usage
            parts = zip(choices, strict=True) if is_few else (choices,)
            return [encoder.event(part, so_far) for part in parts]

        with self._claimed(generation):
            async with aclosing(self._news(generation)) as parts:
                async for arrived in parts:
                    begun, news = encoded(arrived)
                    if not (begun or news):
                        continue
                    now = time.monotonic()
                    if outlet.last != generation.started:
                        metrics.INTER_TOKEN_LATENCY.observe(now - outlet.last)
                    outlet.last = now
                    said = events(begun) if begun else []
                    if is_continuous:
                        told = generation.completion_tokens
                    for choices in news:
                        said += events(choices)
                    yield together(said)
                    if around_text is not None:
                        outlet.begin, outlet.end = encoder.around(around_text, usage)
            if generation.samples is not UNSET:
                yield encoder.event([], UNSET, generation.samples)
            if options and options.include_usage:
                yield encoder.event([], generation.usage)

    def _news(self, generation: Generation) -> AsyncGenerator[_News, None]:
        """Return what arrives: whole choices if they are asked for, else tokens."""
        if not generation.request.stream_whole:
            return generation.deltas(self._client, self._writer)
        certain = self._certain(generation)
        # Early ends free slots, whether the client reads or not.
        return read_ahead(certain) if generation.request.ends_early else certain

    async def _certain(self, generation: Generation) -> AsyncGenerator[list[Delta], None]:
        """Yield the choices of the reply, whole, as soon as each is certain, AT_ONCE at a time."""
        async with aclosing(generation.deltas(self._client, self._writer)) as parts:
            async for news in parts:
                certain = await generation.certain(news)
                for at in range(0, len(certain), AT_ONCE):
                    yield certain[at : at + AT_ONCE]
        rest = generation.rest()
        for at in range(0, len(rest), AT_ONCE):
            yield rest[at : at + AT_ONCE]

    @contextmanager
    def _claimed(self, generation: Generation) -> Iterator[None]:
        """Hold the generation's id, and record its metrics however it ends. Raises IdInUse."""
        if generation.id in self._ids_in_use:
            raise IdInUse(
                f"request_id {generation.id!r} is in use by a running request", "request_id"
            )
        self._ids_in_use.add(generation.id)
        try:
            yield
        finally:
            self._ids_in_use.remove(generation.id)
            _record(generation)


_News = TokenDeltas | list[Delta]
_Choices = tuple[list[Raw], list[list[Raw]]]
"""Choices that begin, and the choices of each event."""


def _encoding(encoder: Encoder) -> Callable[[_News], _Choices]:
    """Return how a stream is encoded: whole choices, new tokens straight from arrays where nothing
    but text is wanted, or the new text of each choice."""
    generation, request = encoder.generation, encoder.request
    rendering = encoder.rendering() if generation.is_plain else None
    pacing = Pacing(request.stream_interval or 1)
    is_joined = generation.num_choices > MOST_ALONE

    def encoded(news: _News) -> _Choices:
        if isinstance(news, list):
            return [], [[encoder.whole(choice, is_event=True) for choice in news]]
        if rendering is not None:
            choices = [*map(Raw, rendering.render(generation.pass_on(news), is_joined))]
            return [], [choices] if choices else []
        deltas = pacing.take(generation.texts(news))
        return encoder.begun(deltas), encoder.news(deltas)

    return encoded


def _record(generation: Generation) -> None:
    """Record the metrics of a request that has ended, in whatever way."""
    usage = generation.usage
    metrics.PROMPT_TOKENS.inc(usage.prompt_tokens)
    metrics.COMPLETION_TOKENS.inc(usage.completion_tokens)
    metrics.REQUEST_PROMPT_TOKENS.observe(usage.prompt_tokens)
    metrics.REQUEST_COMPLETION_TOKENS.observe(usage.completion_tokens)
    metrics.REQUEST_CHOICES.observe(generation.num_choices)
    if generation.is_durable:  # nobody waits for it
        return
    metrics.E2E_REQUEST_LATENCY.observe(time.monotonic() - generation.started)
    first_token_s = generation.first_output and generation.first_output - generation.started
    note_completion(
        generation.id,
        usage.prompt_tokens,
        usage.completion_tokens,
        generation.discarded_tokens,
        first_token_s,
    )
    if generation.first_output is not None:
        metrics.TIME_TO_FIRST_TOKEN.observe(generation.first_output - generation.started)


class Pacing:
    """`stream_interval`: holds back the deltas of a choice until they have enough tokens.

    A choice's first tokens are passed on at once, so that the time to the first token does not
    grow; so are its last, since nothing comes after them.
    """

    def __init__(self, min_tokens: int) -> None:
        self._min_tokens = min_tokens
        self._held: dict[int, list[Delta]] = {}
        self._num_held: dict[int, int] = {}  # tokens

    def take(self, deltas: list[Delta]) -> list[Delta]:
        """Return what may be sent now, joined with what was held back before it."""
        ready = []
        for delta in deltas:
            held = self._held.setdefault(delta.index, [])
            held.append(delta)
            count = self._num_held.get(delta.index, 0) + delta.num_tokens
            if delta.is_first or delta.finish_reason or count >= self._min_tokens:
                ready.append(join(self._held.pop(delta.index)))
                count = 0
            self._num_held[delta.index] = count
        return ready
