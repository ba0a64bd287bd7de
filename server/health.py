"""GET /health: this process is alive. GET /ready: the engine answers and takes requests."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from engine.client import EngineClient
from engine.errors import EngineUnavailable


def routes(client: EngineClient) -> APIRouter:
    """The routes of this module."""
    router = APIRouter()

    @router.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": "ok"})

    @router.get("/ready")
    async def ready() -> Response:
        if client.status is None:
            raise EngineUnavailable("the engine does not answer")
        if client.status.state != "ready":
            raise EngineUnavailable(f"the engine is {client.status.state}")
        return JSONResponse({"status": "ready"})

    return router
