"""Outermost middleware: request ids; a log line, metric and span of each request; last resort.

Every reply carries `x-request-id`, the client's own if it sent a sane one. An unforeseen error is
logged here and answered with 500, so nothing below has to catch it. Never logs bodies. Paths end
without a slash and do not have `root_path` from here on, and HEAD is GET: the connection leaves the
body out.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from http import HTTPStatus

from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from srm.server import errors, metrics
from srm.server.http.headers import headers_of
from srm.server.http.request_log import CURRENT, LogEntry
from srm.server.http.traces import Tracer

log = logging.getLogger(__name__)

_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_PROBES = {"/health", "/ping", "/ready", "/metrics"}
"""Requested every few seconds: logged at DEBUG only, and not traced."""
_METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}
NOT_ENFORCED = "x-srm-not-enforced"
"""Names what of a lenient schema is not enforced, by places."""
IS_HEAD = "srm.is_head"
"""Key of the inner scope: whether the request is HEAD, so that nobody will see the body."""
_CLIENT_GONE = 499
"""Status in logs and metrics of a request whose client left before the reply was complete."""


class _Reply:
    """Sends a reply with the id of its request, and notes the status."""

    def __init__(self, send: Send, entry: LogEntry) -> None:
        self._send, self._entry = send, entry

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._entry.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers["x-request-id"] = self._entry.request_id
            if self._entry.not_enforced is not None:
                headers[NOT_ENFORCED] = self._entry.not_enforced
        try:
            await self._send(message)
        except RuntimeError as error:  # uvloop's, after the server hung up on garbage behind it
            if "handler is closed" not in str(error):
                raise
            raise ClientDisconnect from error


class RequestMiddleware:
    """ASGI middleware around everything else."""

    def __init__(self, app: ASGIApp, tracer: Tracer | None = None, root_path: str = "") -> None:
        self._app = app
        self._tracer = tracer
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = headers_of(scope).get("x-request-id", "")
        entry = LogEntry(given if _SANE_ID.fullmatch(given) else uuid.uuid4().hex)
        CURRENT.set(entry)
        started = time.monotonic()
        started_ns = time.time_ns()
        asked = scope["method"]
        inner = {
            **scope,
            "method": "GET" if asked == "HEAD" else asked,
            IS_HEAD: asked == "HEAD",
            "path": self._below_root(scope["path"].rstrip("/")) or "/",
        }

        reply = _Reply(send, entry)
        metrics.HTTP_IN_FLIGHT.inc()
        try:
            await self._app(inner, receive, reply)
        except ClientDisconnect:
            entry.status = _CLIENT_GONE
        except asyncio.CancelledError:  # a stop that has waited long enough ends what still runs
            if not entry.status:
                await errors.srm_error(errors.stopping())(inner, receive, reply)
        except Exception:
            log.exception("request failed", extra={"fields": {"request_id": entry.request_id}})
            if entry.status:  # too late: the connection breaks, and the client sees it
                raise
            await errors.response(500, errors.INTERNAL)(inner, receive, reply)
        finally:
            metrics.HTTP_IN_FLIGHT.dec()
            status = entry.status
            if status < HTTPStatus.BAD_REQUEST:
                status = entry.broken_off or status
            method = asked if asked in _METHODS else "other"
            route = getattr(inner.get("route"), "path", "other")
            _record(route, method, status, time.monotonic() - started, entry)
            if self._tracer is not None and route not in _PROBES:
                self._tracer.record(scope, route, status, started_ns, entry)

    def _below_root(self, path: str) -> str:
        """Return the path without `root_path`, if it is below it."""
        root = self._root_path
        if root and (path == root or path.startswith(f"{root}/")):
            return path.removeprefix(root)
        return path


def _record(route: str, method: str, status: int, seconds: float, entry: LogEntry) -> None:
    metrics.HTTP_REQUESTS.labels(route, method, str(status)).inc()
    metrics.HTTP_SECONDS.labels(route, method).observe(seconds)
    level = logging.DEBUG if route in _PROBES else logging.INFO
    if log.isEnabledFor(level):
        parts = {"method": method, "route": route, "status": status, "seconds": round(seconds, 4)}
        log.log(level, "answered", extra={"fields": parts | entry.fields()})
