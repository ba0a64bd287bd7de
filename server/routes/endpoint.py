"""A route that generates: what completions and chats have in common. Knows no field of a body."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.generation.encoding import Encoder
from server.generation.engine_request import RequestOwner, of_current_request
from server.generation.responder import Responder
from server.http.bodies import read_body
from server.http.responses import WhileConnected


class Endpoint(ABC):
    """Answers the requests of one route for one model."""

    path: str
    id_prefix: str
    """The beginning of a reply's id."""

    def __init__(self, responder: Responder) -> None:
        self._responder = responder

    @abstractmethod
    async def begin(self, body: bytes, id: str, owner: RequestOwner) -> Encoder:
        """Make a request ready to run. Raises the RequestError to answer with."""

    async def answer(self, body: bytes) -> Response:
        """Return the reply to a body. Raises the RequestError to answer with."""
        id = f"{self.id_prefix}-{uuid.uuid4().hex}"
        return await self._responder.respond(await self.begin(body, id, of_current_request()))

    async def whole(self, body: bytes, id: str, owner: RequestOwner) -> bytes:
        """Return the JSON of the reply to a body without `stream`, for callers without a
        connection. Raises the SRMError to answer with."""
        return await self._responder.whole(await self.begin(body, id, owner))

    def routes(self, max_body_bytes: int) -> APIRouter:
        """Return the route."""
        router = APIRouter()

        @router.post(self.path)
        async def create(request: Request) -> Response:
            body = await read_body(request, max_body_bytes)
            return WhileConnected(lambda: self.answer(body))

        return router
