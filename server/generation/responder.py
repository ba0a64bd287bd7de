"""Running a generation and answering with it, whole or as a stream, in the shape of its route.

What a completion and a chat completion have in common: when something is sent, usage, metrics. How
it is spelled is a Shape's business. Knows no fields of requests but those of streams and tokens.
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
"""Choices of a request up to which each has events of its own, since many clients read the first
choice of an event and no other."""

UsageField = Usage | UnsetType | None
"""Absent, null or there."""
SamplesField = list[Samples] | UnsetType
"""Of each prompt, or absent."""


class Shape(Protocol):
    """How the replies to one request are spelled."""

    def choice(self, whole: Delta) -> Raw:
        """A finished choice of a whole reply."""

    def reply(self, choices: list[Raw], usage: Usage, samples: SamplesField) -> bytes:
        """The whole reply."""

    def whole_news(self, whole: Delta) -> Raw:
        """A finished choice in an event of a stream."""

    def begun(self, deltas: list[Delta]) -> list[Raw]:
        """Choices that say that a completion begins, before anything of it is told."""

    def news(self, deltas: list[Delta]) -> list[list[Raw]]:
        """The choices of each event that tells these deltas; none if nobody waits for them."""

    def rendering(self) -> Choices | None:
        """What writes choices that are nothing but text straight from arrays, if anything can."""

    def event(self, choices: list[Raw], usage: UsageField, samples: SamplesField = UNSET) -> bytes:
        """An event of a stream."""


class Responder:
    """Answers the requests of one API process."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._ids_in_use: set[str] = set()

    async def respond(self, generation: Generation, shape: Shape) -> Response:
        """The reply, or a stream whose first event is there.

        Raises what the engine refuses with, and IdInUse if a request of this id is running.
        """
        if generation.request.stream:
            events = self._events(generation, shape)
            return EventStream(await anext(events), events)
        return json_reply(await self.whole(generation, shape))

    async def whole(self, generation: Generation, shape: Shape) -> bytes:
        """The reply in one piece, of a request that asks for no stream. Raises as `respond`."""
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
        """The reply as a stream of one or more events at a time.

        The choices with news share an event, but for those of a request of few.
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
        """Choices that begin, and those of each event to send.

        They are made from arrays where nothing but text is wanted.
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
            if generation.request.ends_early:  # and frees slots, whether somebody reads or not
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
        """While nothing else runs under its id; counted however it ends."""
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
    """Count a request that has ended, in whatever way."""
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
