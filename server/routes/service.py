"""What clients ask of a server before they send it work: its version, whether it is there, how many
workers it has. Knows no engine.
"""

from __future__ import annotations

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from server.http.bodies import json_reply
from server.schema.openapi import Operation

VERSION = "0.2.0"
"""Of this server, as in pyproject.toml."""


class Version(msgspec.Struct):
    version: str


class Pong(msgspec.Struct):
    """That it came is all there is to it."""


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
    """Of which processes each holds a part of the model: TRL asks."""
    return json_reply(msgspec.json.encode(WorldSize(1)))
