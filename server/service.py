"""What clients ask of a server before they send it work: its version, whether it is there, how many
workers it has. Knows no engine.
"""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

VERSION = "0.1.0"
"""Of this server, as in pyproject.toml."""

router = APIRouter()


@router.get("/version")
async def version() -> Response:
    return JSONResponse({"version": VERSION})


@router.get("/ping")
@router.post("/ping")
async def ping() -> Response:
    """Whether this process is alive, as hosting services ask."""
    return JSONResponse({})


@router.get("/get_world_size")
async def get_world_size() -> Response:
    """Of which processes each holds a part of the model: TRL asks."""
    return JSONResponse({"world_size": 1})
