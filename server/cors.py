"""Pages of other origins, where `cors_origins` allows them. Refusals have our error shape."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp

from engine.errors import InvalidRequest
from server import errors

EXPOSED = ("x-request-id", "retry-after", "x-should-retry")
"""Headers of replies that a page may read."""


class Cors(CORSMiddleware):
    """Starlette's, for what this server takes."""

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        super().__init__(
            app,
            allow_origins=origins,
            allow_methods=["GET", "HEAD", "POST"],
            allow_headers=["*"],
            expose_headers=EXPOSED,
        )

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        if response.status_code < 400:
            return response
        origin = request_headers.get("origin", "")
        method = request_headers.get("access-control-request-method", "")
        error = InvalidRequest(f"not allowed here: {method[:20]} from origin {origin[:80]!r}")
        return errors.response(400, errors.body_of(error))
