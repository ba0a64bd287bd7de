"""Running a generation and answering with it, whole or as a stream, in the shape of its route.

Handles what completions and chat completions have in common: when something is sent, usage,
metrics. A Shape encodes it. Knows no fields of requests but those of streams and tokens.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import aclosing, contextmanager
from operator import itemgetter
from typing import Protocol

from msgspec import UNSET, Raw, UnsetType
from starlette.responses import Response

from engine.client.client import EngineClient
from engine.errors import IdInUse, InvalidRequest
from server import metrics
from server.generation.generation import Generation
from server.generation.pacing import Pacing
from server.generation.read_ahead import read_ahead
from server.generation.rendering import Choices
from server.http.bodies import json_reply
from server.http.request_log import note_completion
from server.http.responses import EventStream, together
from server.schema.completion_response import Samples, Usage
from server.text.sample import Delta

MOST_ALONE = 16
"""Most choices of a request for which each has events of its own, since many clients read only the
first choice of an event."""

UsageField = Usage | UnsetType | None
"""UNSET (absent), null, or the usage."""
SamplesField = list[Samples] | UnsetType
"""The counts of each prompt, or UNSET (absent)."""


class Shape(Protocol):
    """Encodes the replies to one request."""

    def choice(self, whole: Delta) -> Raw:
        """A finished choice of a whole reply."""

    def reply(self, choices: list[Raw], usage: Usage, samples: SamplesField) -> bytes:
        """The whole reply."""

    def whole_news(self, whole: Delta) -> Raw:
        """A finished choice in an event of a stream."""

    def begun(self, deltas: list[Delta]) -> list[Raw]:
        """Choices that announce a completion, before any of its text."""

    def news(self, deltas: list[Delta]) -> list[list[Raw]]:
        """The choices of each event for these deltas; none if there is nothing to send."""

    def rendering(self) -> Choices | None:
        """The renderer of text-only choices straight from arrays, or None."""

    def event(self, choices: list[Raw], usage: UsageField, samples: SamplesField = UNSET) -> bytes:
        """An event of a stream."""


class Responder:
    """Answers the requests of one API process."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._ids_in_use: set[str] = set()

    async def respond(self, generation: Generation, shape: Shape) -> Response:
        """Return the reply, or a stream whose first event is there.

        Raises what the engine refuses with, and IdInUse if a request of this id is running.
        """
        if generation.request.stream:
            events = self._events(generation, shape)
            return EventStream(await anext(events), events)
        return json_reply(await self.whole(generation, shape))

    async def whole(self, generation: Generation, shape: Shape) -> bytes:
        """Return the whole reply to a request without `stream`. Raises as `respond`."""
        if generation.request.stream:
            raise InvalidRequest("stream must be false here, got true", "stream")
        choices: list[tuple[int, Raw]] = []
        with self._claimed(generation):
            async with aclosing(generation.wholes(self._client)) as batches:
                async for wholes in batches:
                    choices += [(whole.index, shape.choice(whole)) for whole in wholes]
        choices.sort(key=itemgetter(0))
        return shape.reply([raw for _, raw in choices], generation.usage, generation.samples)

    async def _events(self, generation: Generation, shape: Shape) -> AsyncGenerator[bytes, None]:
        """Yield the reply as a stream, one or more events at a time.

        Choices with news share an event, except in requests of at most MOST_ALONE choices.
        """
        options = generation.request.stream_options
        is_continuous = bool(options and options.continuous_usage_stats)
        usage: UsageField = None if options and options.include_usage else UNSET
        last = generation.started
        told = 0  # tokens
        is_few = generation.num_choices <= MOST_ALONE

        def events(news: Iterable[list[Raw]]) -> Iterator[bytes]:
            so_far = generation.usage_of(told) if is_continuous else usage
            for choices in news:
                for part in ([one] for one in choices) if is_few else (choices,):
                    yield shape.event(part, so_far)

        with self._claimed(generation):
            async with aclosing(self._news(generation, shape)) as parts:
                async for begun, news in parts:
                    if not (begun or news):
                        continue
                    now = time.monotonic()
                    if last != generation.started:
                        metrics.INTER_TOKEN_LATENCY.observe(now - last)
                    last = now
                    before = [*events([begun] if begun else [])]
                    told = generation.completion_tokens
                    yield together([*before, *events(news)])
            if generation.samples is not UNSET:
                yield shape.event([], UNSET, generation.samples)
            if options and options.include_usage:
                yield shape.event([], generation.usage)

    async def _news(
        self, generation: Generation, shape: Shape
    ) -> AsyncGenerator[tuple[list[Raw], list[list[Raw]]], None]:
        """Yield the choices that begin, and the choices of each event to send.

        They are rendered from arrays where nothing but text is wanted.
        """
        is_joined = generation.num_choices > MOST_ALONE
        if generation.is_plain and (rendering := shape.rendering()) is not None:
            async with aclosing(generation.news(self._client)) as parts:
                async for news in parts:
                    choices = [*map(Raw, rendering.render(news, is_joined))]
                    yield [], [choices] if choices else []
            return
        if generation.request.stream_whole:
            source = generation.wholes(self._client)
            if generation.request.ends_early:  # and frees slots, whether the client reads or not
                source = read_ahead(source)
            async with aclosing(source) as wholes:
                async for whole in wholes:
                    yield [], [[shape.whole_news(one) for one in whole]] if whole else []
            return
        pacing = Pacing(generation.request.stream_interval or 1)
        async with aclosing(generation.deltas(self._client)) as batches:
            async for deltas in batches:
                paced = pacing.take(deltas)
                yield shape.begun(paced), shape.news(paced)

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
