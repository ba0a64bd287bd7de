"""Running a generation and answering with it, whole or as a stream.

Handles what completions and chat completions have in common: when something is sent, usage,
metrics. An Encoder encodes it. Knows no fields of requests but those of streams and tokens.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from operator import itemgetter

from msgspec import UNSET, Raw
from starlette.responses import Response

from engine.client.client import EngineClient
from engine.errors import IdInUse, InvalidRequest
from engine.steps.token_deltas import TokenDeltas
from server import metrics
from server.generation.encoding import Encoder
from server.generation.event_writer import EventWriter
from server.generation.generation import AT_ONCE, Generation
from server.generation.read_ahead import read_ahead
from server.generation.stream_events import StreamEvents
from server.http.bodies import json_reply
from server.http.request_log import note_completion
from server.http.responses import EventStream, together
from server.text.sample import Delta


class Responder:
    """Answers the requests of one API process."""

    def __init__(
        self, client: EngineClient, writer: EventWriter, stream_max_rate: float = 0.0
    ) -> None:
        """`stream_max_rate`: most times a second that a stream is sent events; 0: any number."""
        self._client = client
        # Who waits between events takes what came meanwhile, as a slow reader does.
        self._writer = None if stream_max_rate else writer
        self._pause_s = 1 / stream_max_rate if stream_max_rate else 0.0
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
        """Yield the reply as a stream, one or more events at a time."""
        generation, options = encoder.generation, encoder.request.stream_options
        stream, outlet = StreamEvents(encoder), generation.outlet
        with self._claimed(generation):
            async with aclosing(self._news(generation)) as parts:
                async for arrived in parts:
                    events = stream.events(arrived)
                    if not events:
                        continue
                    now = time.monotonic()
                    if outlet.last != generation.started:
                        metrics.INTER_TOKEN_LATENCY.observe(now - outlet.last)
                    outlet.last = now
                    yield together(events)
                    outlet.rendering = stream
                    if self._pause_s and generation.is_awaited:
                        await asyncio.sleep(self._pause_s)
            if generation.samples is not UNSET:
                yield encoder.event([], UNSET, generation.samples)
            if options and options.include_usage:
                yield encoder.event([], generation.usage)

    def _news(self, generation: Generation) -> AsyncGenerator[TokenDeltas | list[Delta], None]:
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
            generation.outlet.rendering = None  # or a cycle waits for the collector
            _record(generation)


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
