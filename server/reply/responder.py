"""Running a generation and answering with it, whole or as a stream.

Handles what all kinds of replies have in common: when something is sent, and metrics.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from functools import partial
from operator import itemgetter

from msgspec import Raw
from starlette.responses import Response

from srm.engine.client.client import EngineClient
from srm.engine.errors import IdInUse, InvalidRequest
from srm.server import metrics
from srm.server.generation.detokenize import ChoicePart
from srm.server.generation.generation import AT_ONCE, Generation
from srm.server.generation.read_ahead import read_ahead
from srm.server.http.bodies import json_reply
from srm.server.http.request_log import note_completion
from srm.server.http.responses import WAITING, EventStream
from srm.server.reply.format import Format
from srm.server.reply.renderer import Renderer
from srm.server.reply.stream_writer import Outlet, StreamWriter
from srm.server.reply.template import Pieces
from srm.server.text.text import Text


class Responder:
    """Answers the requests of one API process."""

    def __init__(
        self,
        client: EngineClient,
        text: Text,
        stream_max_rate: float = 0.0,
        stream_keepalive_s: float = 0.0,
    ) -> None:
        """`stream_max_rate`: most times a second that a stream is sent events; 0: any number.
        `stream_keepalive_s`: after so many seconds without one it is sent a comment; 0: it is not.
        """
        self._client = client
        self.pieces = Pieces(text)
        # Who waits between events takes what came meanwhile, as a slow reader does.
        self._writer = None if stream_max_rate else StreamWriter(client, self.pieces)
        self._pause_s = 1 / stream_max_rate if stream_max_rate else 0.0
        self._keepalive_s = stream_keepalive_s
        self._ids_in_use: set[str] = set()

    async def respond(self, form: Format) -> Response:
        """Return the reply, or a stream whose first event, or comment, is there.

        Raises what the engine refuses with, and IdInUse if a request of this id is running.
        """
        if not form.request.stream:
            return json_reply(await self.render_whole(form))
        outlet = Outlet(Renderer(form, self._client, self.pieces))
        events = self.events(outlet)
        return EventStream(await anext(events), events, outlet, form.frame_error, form.last_event)

    async def render_whole(self, form: Format) -> bytes:
        """Return the whole reply to a request without `stream`. Raises as `respond`."""
        if form.request.stream:
            raise InvalidRequest("stream must be false here, got true", "stream")
        renderer = Renderer(form, self._client, self.pieces)
        choices: list[tuple[int, Raw]] = []
        with self._claimed(form.generation):
            async with aclosing(self._certain(form.generation)) as parts:
                async for certain in parts:
                    for some in _divide(certain):  # encoded between other requests' turns
                        choices += [(part.index, renderer.choice(part)) for part in some]
                        await asyncio.sleep(0)
        choices.sort(key=itemgetter(0))
        return renderer.reply([raw for _, raw in choices])

    async def events(self, outlet: Outlet) -> AsyncGenerator[bytes, None]:
        """Yield the reply as a stream, one or more events at a time, but for what is written to the
        outlet's connection meanwhile."""
        renderer = outlet.renderer
        generation = renderer.generation
        with self._claimed(generation), self._waking(outlet):
            source = self._whole_events if generation.request.stream_whole else self._token_events
            async with aclosing(source(outlet)) as parts:
                async for events in parts:
                    if not events:
                        if outlet.is_quiet:
                            outlet.is_quiet = False
                            yield WAITING
                        continue
                    now = time.monotonic()
                    if outlet.has_begun:
                        metrics.INTER_TOKEN_LATENCY.observe(now - outlet.last_sent)
                    outlet.last_sent = now
                    yield events
                    outlet.has_begun = True
                    if self._pause_s and generation.is_awaited:
                        await asyncio.sleep(self._pause_s)
            if last := renderer.last_events():
                yield last

    async def _token_events(self, outlet: Outlet) -> AsyncGenerator[bytes, None]:
        """Yield the events for tokens as they come."""
        renderer, attach = outlet.renderer, None
        if self._writer is not None and renderer.may_be_written:
            attach = partial(self._writer.writing, outlet)
        run = renderer.generation.run(self._client, renderer.at_once, attach)
        async with aclosing(run) as arriving:
            async for tokens in arriving:
                yield renderer.events(tokens)

    async def _whole_events(self, outlet: Outlet) -> AsyncGenerator[bytes, None]:
        """Yield the events of whole choices, as soon as each is certain."""
        renderer = outlet.renderer
        certain = self._certain(renderer.generation)
        # Early ends free slots, whether the client reads or not.
        is_ahead = renderer.generation.request.ends_early
        source = read_ahead(certain, _chain) if is_ahead else certain
        async with aclosing(source) as arriving:
            async for parts in arriving:
                for some in _divide(parts):
                    yield renderer.whole_events(some)

    async def _certain(self, generation: Generation) -> AsyncGenerator[list[ChoicePart], None]:
        """Yield the choices of the reply, whole, as soon as each is certain."""
        async with aclosing(generation.run(self._client)) as arriving:
            async for tokens in arriving:
                yield await generation.certain(tokens)
        yield generation.rest()

    @contextmanager
    def _waking(self, outlet: Outlet) -> Iterator[None]:
        """Wake the task of a stream whenever it was sent nothing for `stream_keepalive_s`."""
        if not self._keepalive_s:
            yield
            return
        call_later = asyncio.get_running_loop().call_later
        timer: asyncio.TimerHandle

        def check() -> None:
            nonlocal timer
            left_s = outlet.last_sent + self._keepalive_s - time.monotonic()
            if left_s <= 0:
                left_s, outlet.is_quiet = self._keepalive_s, True
                if (stream := outlet.renderer.generation.stream) is not None:
                    stream.wake()
            timer = call_later(left_s, check)

        timer = call_later(self._keepalive_s, check)
        try:
            yield
        finally:
            timer.cancel()

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
    usage = generation.usage_of(generation.completion_tokens)
    metrics.PROMPT_TOKENS.inc(usage.prompt_tokens)
    metrics.COMPLETION_TOKENS.inc(usage.completion_tokens)
    metrics.REQUEST_PROMPT_TOKENS.observe(usage.prompt_tokens)
    metrics.REQUEST_COMPLETION_TOKENS.observe(usage.completion_tokens)
    metrics.REQUEST_CHOICES.observe(generation.num_choices)
    if generation.owner.durable:  # nobody waits for it
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


def _divide(parts: list[ChoicePart]) -> Iterator[list[ChoicePart]]:
    """Divide parts into lists of AT_ONCE, at least one."""
    return (parts[at : at + AT_ONCE] for at in range(0, max(len(parts), 1), AT_ONCE))


def _chain(lists: list[list[ChoicePart]]) -> list[ChoicePart]:
    return [part for parts in lists for part in parts]
