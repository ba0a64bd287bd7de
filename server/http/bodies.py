"""Reads request bodies and writes JSON replies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from srm.server.errors import BodyTooLarge, WrongContentType
from srm.server.schema.json_parts import SMALL

T = TypeVar("T")
_large_bodies = ThreadPoolExecutor(1, thread_name_prefix="large bodies")
"""One thread, so that however many come at once the event loop shares the interpreter with one."""

FORMS = {"application/x-www-form-urlencoded", "multipart/form-data", "text/plain"}
"""Content types that a browser lets any page send to any server, without asking first."""


async def read_body(request: Request, limit: int, kind: str = "application/json") -> bytes:
    """Return the request's body of this content type, which it need not name. Raises
    WrongContentType, and BodyTooLarge at once."""
    given = request.headers.get("content-type", "")
    if given.partition(";")[0].strip().lower() in FORMS:
        raise WrongContentType(
            f"content-type must be {kind}; got {given[:80]!r} (curl -d sends that unless there is "
            f"-H 'Content-Type: {kind}')",
            "content-type",
        )
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise BodyTooLarge(f"the body is larger than {limit} bytes")
    return bytes(body)


async def parsed(parse: Callable[[bytes], T], body: bytes) -> T:
    """Return what `parse` makes of a body; of a large one in a thread, while others are answered.
    Raises what it raises."""
    if len(body) <= SMALL:
        return parse(body)
    return await asyncio.get_running_loop().run_in_executor(_large_bodies, parse, body)


def json_reply(reply: bytes | msgspec.Struct) -> Response:
    """Return the reply of this JSON, or of a struct's."""
    body = reply if isinstance(reply, bytes) else msgspec.json.encode(reply)
    return Response(body, media_type="application/json")
