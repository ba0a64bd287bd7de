"""The edge between HTTP and us: request ids, one log line and one metric per request, last resort.

Every reply carries `x-request-id`, the client's own if it sent a sane one. What nobody foresaw is
logged here and answered with 500, so nothing below has to catch it. Never logs bodies.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server import errors, metrics

log = logging.getLogger(__name__)

_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_PROBES = {"/health", "/ready", "/metrics"}
"""Asked every few seconds: not worth a line each time."""
_METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}
_CLIENT_GONE = 499
"""Status in logs and metrics of a request whose client left before the reply was complete."""


class Boundary:
    """ASGI middleware around everything else."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _SANE_ID.fullmatch(given) else uuid.uuid4().hex
        started = time.monotonic()
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            try:
                await send(message)
            except RuntimeError as error:  # uvloop's, after the server hung up on garbage behind it
                if "handler is closed" not in str(error):
                    raise
                raise ClientDisconnect from error

        metrics.HTTP_IN_FLIGHT.inc()
        try:
            await self._app(scope, receive, send_with_id)
        except ClientDisconnect:
            status = _CLIENT_GONE
        except asyncio.CancelledError:  # a stop that has waited long enough ends what still runs
            if not status:
                reply = await errors.srm_error(Request(scope), errors.STOPPING)
                await reply(scope, receive, send_with_id)
        except Exception:
            log.exception("request failed request_id=%s", request_id)
            if status:  # too late for another one: the connection breaks, and the client sees it
                raise
            await errors.response(500, errors.INTERNAL)(scope, receive, send_with_id)
        finally:
            metrics.HTTP_IN_FLIGHT.dec()
            _record(scope, status, time.monotonic() - started, request_id)


def _record(scope: Scope, status: int, seconds: float, request_id: str) -> None:
    route = getattr(scope.get("route"), "path", "other")
    method = scope["method"] if scope["method"] in _METHODS else "other"
    metrics.HTTP_REQUESTS.labels(route, method, str(status)).inc()
    metrics.HTTP_SECONDS.labels(route, method).observe(seconds)
    level = logging.DEBUG if route in _PROBES else logging.INFO
    text = "%s %s status=%d seconds=%.4f request_id=%s"
    log.log(level, text, method, route, status, seconds, request_id)
