"""The events of a stream that wants nothing but text: from arrays, without an object per choice.

Knows the shape of a reply only through functions that encode it.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from msgspec import UNSET, Raw, UnsetType

from engine.client import EngineClient
from server import metrics
from server.generation import Generation
from server.rendering import Choices
from server.replies import Usage

_CHOICES = Raw(b'"here go the choices"')

Event = Callable[[list[Raw], Usage | UnsetType | None], bytes]
"""An event as JSON, of its choices and usage."""


async def plain_events(
    client: EngineClient,
    generation: Generation,
    choices: Choices,
    event: Event,
    record: Callable[[Generation], None],
) -> AsyncGenerator[bytes, None]:
    """The reply as a stream of JSON documents; `record` is called however it ends."""
    options = generation.request.stream_options
    usage: Usage | UnsetType | None = None if options and options.include_usage else UNSET
    is_continuous = bool(options and options.continuous_usage_stats)
    begin, end = event([_CHOICES], usage).split(_CHOICES)
    last = generation.started
    try:
        async with aclosing(generation.news(client)) as parts:
            async for news in parts:
                body = choices.render(news)
                if not body:
                    continue
                now = time.monotonic()
                if last != generation.started:
                    metrics.INTER_TOKEN_LATENCY.observe(now - last)
                last = now
                if is_continuous:
                    yield event([Raw(body)], generation.usage)
                else:
                    yield b"%b%b%b" % (begin, body, end)
        if options and options.include_usage:
            yield event([], generation.usage)
    finally:
        record(generation)
