"""GET /health: this process is alive. GET /ready: the engine answers and takes requests."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from engine.client import EngineClient
from engine.errors import EngineUnavailable
from server.openapi import Operation


class Health(msgspec.Struct):
    status: str
    """`ok` or `ready`."""


OPERATIONS = (
    Operation(method="GET", path="/health", summary="The API process is alive.", reply=Health),
    Operation(
        method="GET",
        path="/ready",
        summary="Completions would be answered; 503 while the engine starts, drains or is gone.",
        reply=Health,
    ),
)


def routes(client: EngineClient) -> APIRouter:
    """The routes of this module."""
    router = APIRouter()

    @router.get("/health")
    async def health() -> Response:
        return _answer("ok")

    @router.get("/ready")
    async def ready() -> Response:
        if client.status is None:
            raise EngineUnavailable("the engine does not answer")
        if client.status.state != "ready":
            raise EngineUnavailable(f"the engine is {client.status.state}")
        return _answer("ready")

    return router


def _answer(status: str) -> Response:
    return Response(msgspec.json.encode(Health(status)), media_type="application/json")
