"""Routes that clients ask before they send work: health, readiness, version, world size.

GET /health: this process is alive. GET /ready: the engine makes progress and takes requests.

The engine is asked every second and answers between steps. So an answer that says more steps than
the one before, or that there is nothing to do, is progress; an engine that has work and makes no
step, and one that does not answer at all (stopped, or hanging inside a step), is stalled.
"""

from __future__ import annotations

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from engine.client.client import EngineClient
from engine.errors import EngineUnavailable
from server.http.bodies import json_reply
from server.http.draining import Draining
from server.schema.openapi import Operation

VERSION = "0.2.0"
"""Version of this server, as in pyproject.toml."""


class Health(msgspec.Struct):
    status: str
    """`ok` or `ready`."""


class Version(msgspec.Struct):
    version: str


class Pong(msgspec.Struct):
    """An empty reply: the process is alive."""


class WorldSize(msgspec.Struct):
    world_size: int
    """Processes that each hold a part of the model."""


OPERATIONS = (
    Operation("GET", "/health", "The API process is alive.", Health),
    Operation("GET", "/ready",
              "Completions would be answered; 503 while the engine starts, drains or is gone.",
              Health),
    Operation("GET", "/version", "Of this server.", Version),
    *(Operation(method, "/ping", "Alive, as hosting services ask.", Pong)
      for method in ("GET", "POST")),
    Operation("GET", "/get_world_size", "How many processes share the model: TRL asks.", WorldSize),
)  # fmt: skip


def check_ready(client: EngineClient, stall_s: float) -> None:
    """Raise EngineUnavailable with the reason if completions would not be answered."""
    status = client.status
    if status is None:
        raise EngineUnavailable("the engine does not answer: it is starting, or gone")
    if status.state != "ready":
        raise EngineUnavailable(f"the engine is {status.state}")
    if client.silent_s > stall_s:
        raise EngineUnavailable(
            f"the engine is stalled: it has not answered for {client.silent_s:.1f} s, and "
            f"stall_s = {stall_s:g}; it is stopped, or hangs in the step after number "
            f"{status.steps}"
        )
    if client.stalled_s > stall_s:
        raise EngineUnavailable(
            f"the engine is stalled: {status.running} sequences run and {status.waiting} wait, and "
            f"it has made no step for {client.stalled_s:.1f} s, and stall_s = {stall_s:g}"
        )


def routes(client: EngineClient, stall_s: float, draining: Draining) -> APIRouter:
    """The routes of this module."""
    router = APIRouter()

    @router.get("/health")
    async def health() -> Response:
        return json_reply(Health("ok"))

    @router.get("/ready")
    async def ready() -> Response:
        draining.check()
        check_ready(client, stall_s)
        return json_reply(Health("ready"))

    @router.get("/version")
    async def version() -> Response:
        return json_reply(Version(VERSION))

    @router.get("/ping")
    @router.post("/ping")
    async def ping() -> Response:
        return json_reply(Pong())

    @router.get("/get_world_size")
    async def get_world_size() -> Response:
        return json_reply(WorldSize(1))

    return router
