"""Bodies of requests, read up to a limit, and of JSON replies. Knows nothing of what they say."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from engine.errors import BodyTooLarge, WrongContentType

FORMS = {"application/x-www-form-urlencoded", "multipart/form-data", "text/plain"}
"""Content types that a browser lets any page send to any server, without asking first."""


async def read_body(request: Request, limit: int) -> bytes:
    """Return the request's JSON body. Raises WrongContentType, and BodyTooLarge at once."""
    given = request.headers.get("content-type", "")
    if given.partition(";")[0].strip().lower() in FORMS:
        raise WrongContentType(
            f"content-type must be application/json; got {given[:80]!r} (curl -d sends that unless "
            "there is -H 'Content-Type: application/json')",
            "content-type",
        )
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise BodyTooLarge(f"the body is larger than {limit} bytes")
    return bytes(body)


def json_reply(reply: bytes | msgspec.Struct) -> Response:
    """Return the reply of this JSON, or of a struct's."""
    body = reply if isinstance(reply, bytes) else msgspec.json.encode(reply)
    return Response(body, media_type="application/json")
