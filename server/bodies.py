"""Bodies of requests, read up to a limit, and of JSON replies. Knows nothing of what they say."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from engine.errors import BodyTooLarge


async def read_body(request: Request, limit: int) -> bytes:
    """The request's body. Raises BodyTooLarge as soon as it is."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise BodyTooLarge(f"the body is larger than {limit} bytes")
    return bytes(body)


def json_reply(body: bytes) -> Response:
    return Response(body, media_type="application/json")
