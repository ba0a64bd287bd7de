"""A route that generates: what completions and chats have in common."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from srm.server.generation.engine_request import RequestOwner, of_current_request
from srm.server.http.bodies import read_body
from srm.server.http.responses import WhileConnected
from srm.server.reply.format import Format
from srm.server.reply.responder import Responder


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

    async def answer(self, body: bytes) -> Response:
        """Return the reply to a body. Raises the RequestError to answer with."""
        id = f"{self.id_prefix}{uuid.uuid4().hex}"
        return await self._responder.respond(await self.begin(body, id, of_current_request()))

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

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        if is_post and scope["path"] in self._routes:
            scope["route"] = route = self._routes[scope["path"]]
            app = route.app
        await app(scope, receive, send)
