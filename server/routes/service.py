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
    Operation(method="GET", path="/version", summary="Of this server.", reply=Version),
    *(
        Operation(
            method=method, path="/ping", summary="Alive, as hosting services ask.", reply=Pong
        )
        for method in ("GET", "POST")
    ),
    Operation(
        method="GET",
        path="/get_world_size",
        summary="How many processes share the model: TRL asks.",
        reply=WorldSize,
    ),
)

router = APIRouter()


@router.get("/version")
async def version() -> Response:
    return json_reply(msgspec.json.encode(Version(VERSION)))


@router.get("/ping")
@router.post("/ping")
async def ping() -> Response:
    """Whether this process is alive, as hosting services ask."""
    return json_reply(msgspec.json.encode(Pong()))


@router.get("/get_world_size")
async def get_world_size() -> Response:
    """Return how many processes each hold a part of the model: TRL asks."""
    return json_reply(msgspec.json.encode(WorldSize(1)))
