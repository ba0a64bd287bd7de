"""/version, /ping and /get_world_size: what clients ask before they send work. Knows no engine."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from server.http.bodies import json_reply
from server.schema.openapi import Operation

VERSION = "0.2.0"
"""Version of this server, as in pyproject.toml."""


class Version(msgspec.Struct):
    version: str


class Pong(msgspec.Struct):
    """An empty reply: the process is alive."""


class WorldSize(msgspec.Struct):
    world_size: int
    """Processes that each hold a part of the model."""


OPERATIONS = (
    Operation("GET", "/version", "Of this server.", Version),
    *(Operation(method, "/ping", "Alive, as hosting services ask.", Pong)
      for method in ("GET", "POST")),
    Operation("GET", "/get_world_size", "How many processes share the model: TRL asks.", WorldSize),
)  # fmt: skip

router = APIRouter()


@router.get("/version")
async def version() -> Response:
    return json_reply(Version(VERSION))


@router.get("/ping")
@router.post("/ping")
async def ping() -> Response:
    """Whether this process is alive, as hosting services ask."""
    return json_reply(Pong())


@router.get("/get_world_size")
async def get_world_size() -> Response:
    """Return how many processes each hold a part of the model: TRL asks."""
    return json_reply(WorldSize(1))
