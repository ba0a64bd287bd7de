"""From the body of a request that generates to its reply, whole or as a stream.

An Endpoint is a route that generates; a Responder runs generations and answers with them. Handles
what all kinds of replies have in common: when something is sent, and metrics.
"""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator
from contextlib import aclosing, contextmanager, nullcontext
from operator import itemgetter
from typing import Any

from msgspec import Raw
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from srm.engine.client.client import EngineClient
from srm.errors import IdInUse, InvalidRequest, RequestError
from srm.server import metrics
from srm.server.generation.detokenize import ChoicePart
from srm.server.generation.engine_request import RequestOwner, of_current_request
from srm.server.generation.generation import AT_ONCE, Generation
from srm.server.generation.read_ahead import read_ahead
from srm.server.http.bodies import json_reply, read_body
from srm.server.http.request_log import CURRENT
from srm.server.http.responses import WAITING, EventStream, WhileConnected
from srm.server.reply.format import Format
from srm.server.reply.renderer import Pieces, Renderer
from srm.server.reply.stream_writer import Outlet, StreamWriter
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
        self._ids_in_use: set[tuple[str, str]] = set()
        """Each with the share that it is of: an id is one key's."""

    async def respond(self, form: Format) -> Response:
        """Return the reply, or a stream.

        Raises what the engine refuses with, and IdInUse if a request of this id is running; so does
        the stream until its first event, or comment, is there.
        """
        if not form.request.stream:
            return json_reply(await self.render_whole(form))
        outlet = Outlet(Renderer(form, self._client, self.pieces))
        return EventStream(self.events(outlet), outlet, form.frame_error, form.last_event)

    async def render_whole(self, form: Format) -> bytes:
        """Return the whole reply to a request without `stream`. Raises as `respond`."""
        if form.request.stream:
            raise InvalidRequest("stream must be false here, got true", "stream")
        renderer = Renderer(form, self._client, self.pieces)
        choices: list[tuple[int, Raw]] = []
        with self._claimed(form):
            async with aclosing(self._certain(form.generation)) as parts:
                async for certain in parts:
                    for some in _divide(certain):  # encoded between other requests' turns
                        choices += [(part.index, renderer.choice(part)) for part in some]
                        await asyncio.sleep(0)
            choices.sort(key=itemgetter(0))
            reply = renderer.reply([raw for _, raw in choices])
            if form.keep is not None:
                await form.keep(reply)
        return reply

    async def events(self, outlet: Outlet) -> AsyncGenerator[bytes, None]:
        """Yield the reply as a stream, one or more events at a time, but for what is written to the
        outlet's connection meanwhile."""
        renderer = outlet.renderer
        generation = renderer.generation
        source: AsyncGenerator[Any, None]
        render: Callable[[Any], bytes]
        arrived: Any
        if generation.request.stream_whole:
            source, render = self._whole_choices(generation), renderer.whole_events
        else:
            source, render = generation.run(self._client, renderer.at_once), renderer.events
        writer = self._writer if renderer.may_be_written else None
        waking = self._waking(outlet) if self._keepalive_s else nullcontext()
        writing = nullcontext() if writer is None else writer.writing(outlet)
        with self._claimed(renderer.form), waking, writing:
            async with aclosing(source) as arriving:
                async for arrived in arriving:
                    if events := render(arrived):
                        now = time.monotonic()
                        if outlet.has_begun:
                            metrics.INTER_TOKEN_LATENCY.observe(now - outlet.last_sent)
                        outlet.last_sent = now
                        yield events
                        outlet.has_begun = True
                        if self._pause_s and generation.is_awaited:
                            await asyncio.sleep(self._pause_s)
                    elif outlet.is_quiet:
                        outlet.is_quiet = False
                        yield WAITING
                    if writer is not None:
                        writer.offer(outlet)
            if renderer.form.keep is not None:
                await renderer.form.keep(renderer.reply([]))
            if last := renderer.last_events():
                yield last

    async def _whole_choices(
        self, generation: Generation
    ) -> AsyncGenerator[list[ChoicePart], None]:
        """Yield whole choices, AT_ONCE at most, as soon as each is certain."""
        certain = self._certain(generation)
        # Early ends free slots, whether the client reads or not.
        source = read_ahead(certain, _chain) if generation.request.ends_early else certain
        async with aclosing(source) as arriving:
            async for parts in arriving:
                for some in _divide(parts):
                    yield some

    async def _certain(self, generation: Generation) -> AsyncGenerator[list[ChoicePart], None]:
        """Yield the choices of the reply, whole, as soon as each is certain."""
        async with aclosing(generation.run(self._client)) as arriving:
            async for tokens in arriving:
                yield await generation.certain(tokens)
        yield await generation.rest()

    @contextmanager
    def _waking(self, outlet: Outlet) -> Iterator[None]:
        """Wake the task of a stream whenever it was sent nothing for `stream_keepalive_s`."""
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
    def _claimed(self, form: Format) -> Iterator[None]:
        """Hold the generation's id, record its metrics however it ends, and have what the engine
        refuses name the request's fields. Raises IdInUse."""
        generation = form.generation
        claimed = (generation.owner.share, generation.id)
        if claimed in self._ids_in_use:
            name = form.field_of("request_id")
            raise IdInUse(f"{name} {generation.id!r} is in use by a running request", name)
        self._ids_in_use.add(claimed)
        try:
            yield
        except RequestError as error:
            if error.param:
                own = form.field_of(error.param)
                # A whole word: max_logprobs is the setting.
                error.message = re.sub(rf"\b{error.param}\b", own, error.message)
                error.param = own
            raise
        finally:
            self._ids_in_use.remove(claimed)
            _record(generation)


def _record(generation: Generation) -> None:
    """Record the metrics of a request that has ended, in whatever way."""
    usage = generation.usage_of(generation.completion_tokens)
    metrics.PROMPT_TOKENS.inc(usage.prompt_tokens)
    metrics.COMPLETION_TOKENS.inc(usage.completion_tokens)
    metrics.REQUEST_PROMPT_TOKENS.observe(usage.prompt_tokens)

    def count(completion_tokens: int, unpaid: int) -> None:
        metrics.REQUEST_COMPLETION_TOKENS.observe(completion_tokens)
        generation.owner.charge(usage.prompt_tokens + unpaid)

    generation.when_counted(count)
    metrics.REQUEST_CHOICES.observe(generation.num_choices)
    if generation.owner.durable:  # nobody waits for it
        return
    metrics.E2E_REQUEST_LATENCY.observe(time.monotonic() - generation.started)
    first_token_s = generation.first_output and generation.first_output - generation.started
    if first_token_s is not None:
        metrics.TIME_TO_FIRST_TOKEN.observe(first_token_s)
    if (entry := CURRENT.get(None)) is not None:  # else nobody asked over HTTP
        entry.completion_id, entry.first_token_s = generation.id, first_token_s
        entry.prompt_tokens += usage.prompt_tokens
        entry.completion_tokens += usage.completion_tokens


def _divide(parts: list[ChoicePart]) -> Iterator[list[ChoicePart]]:
    """Divide parts into lists of AT_ONCE, at least one."""
    return (parts[at : at + AT_ONCE] for at in range(0, max(len(parts), 1), AT_ONCE))


def _chain(lists: list[list[ChoicePart]]) -> list[ChoicePart]:
    return [part for parts in lists for part in parts]


class Endpoint(ABC):
    """Answers the requests of one route for one model."""

    path: str
    id_prefix: str
    """The beginning of a reply's id."""

    def __init__(self, responder: Responder) -> None:
        self._responder = responder

    @abstractmethod
    async def begin(self, body: bytes, id: str, owner: RequestOwner) -> Format:
        """Make a request ready to run. Raises the RequestError to answer with."""

    def make_id(self) -> str:
        """Return a new id of a reply, which cannot be guessed."""
        return f"{self.id_prefix}{uuid.uuid4().hex}"

    async def answer(self, body: bytes) -> Response:
        """Return the reply to a body. Raises the RequestError to answer with."""
        form = await self.begin(body, self.make_id(), of_current_request())
        return await self._responder.respond(form)

    async def answer_whole(self, body: bytes, id: str, owner: RequestOwner) -> bytes:
        """Return the JSON of the reply to a body without `stream`, for callers without a
        connection. Raises the SRMError to answer with."""
        return await self._responder.render_whole(await self.begin(body, id, owner))

    def route(self, max_body_bytes: int) -> Route:
        """Return the route."""
        return _BodyRoute(self, max_body_bytes)


class _BodyRoute(Route):
    """Hands a request's body to an endpoint, past FastAPI: resolving dependencies and keeping two
    exit stacks for a function that has neither costs more than reading the body."""

    def __init__(self, endpoint: Endpoint, max_body_bytes: int) -> None:
        super().__init__(endpoint.path, endpoint.answer, methods=["POST"])

        async def create(scope: Scope, receive: Receive, send: Send) -> None:
            body = await read_body(Request(scope, receive), max_body_bytes)
            await WhileConnected(lambda: endpoint.answer(body))(scope, receive, send)

        self.app = create

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """As FastAPI's routes: the scope says which route it is, by which metrics are counted."""
        match, child = super().matches(scope)
        return match, {**child, "route": self}


class PastRouter:
    """ASGI middleware that hands a POST to one of these routes, past FastAPI and its router, which
    take a seventh of the time that a short stream needs here."""

    def __init__(self, app: ASGIApp, routes: Iterable[Route]) -> None:
        self._app = app
        self._routes = {route.path: route for route in routes}

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        app = self._app
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        if is_post and scope["path"] in self._routes:
            scope["route"] = route = self._routes[scope["path"]]
            app = route.app
        return app(scope, receive, send)
