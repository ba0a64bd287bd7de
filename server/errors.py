"""The server's own errors, and the one table from all errors to HTTP: status, OpenAI error type,
whether a retry makes sense.

RequestError             the caller's fault; ends one request
├─ NotFound
│  └─ ModelNotFound
├─ BodyTooLarge
├─ WrongContentType      a form's, where JSON is wanted
├─ NotAuthorized         no key, or not one of ours
├─ NotPermitted          what only the operator may ask for
├─ BodyTooSlow           its bytes came too slowly
├─ RateLimited           .retry_after_s; more than the key may ask for
├─ PreviousNotFound     the response to go on from, by OpenAI's code and status
├─ Conflict              with what is going on, such as deleting what is needed
└─ QuotaExceeded         more files than the key may keep
StepFailed
└─ NotFinite             of one request: the model's output was no numbers; the engine goes on
StoreError
└─ BatchesUnavailable    batches cannot be run now

Every error body of the server has the nested shape `{"error": {message, type, param, code}}`, and
`"type": "error"`, also those the framework raises.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any, Literal

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Scope

from srm import errors
from srm.errors import MAX_MESSAGE, cut
from srm.server.elsewhere import here


class ModelNotFound(errors.NotFound):
    code = "model_not_found"


class BodyTooLarge(errors.RequestError):
    code = "body_too_large"


class WrongContentType(errors.RequestError):
    code = "unsupported_media_type"


class NotAuthorized(errors.RequestError):
    code = "invalid_api_key"


class NotPermitted(errors.RequestError):
    code = "not_permitted"


class BodyTooSlow(errors.RequestError):
    code = "body_too_slow"


class RateLimited(errors.RequestError):
    """A key has used up its limit. `retry_after_s` is when it may ask again, in seconds."""

    code = "rate_limit_exceeded"

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class PreviousNotFound(errors.RequestError):
    code = "previous_response_not_found"


class Conflict(errors.RequestError):
    code = "conflict"


class QuotaExceeded(errors.RequestError):
    code = "quota_exceeded"


class NotFinite(errors.StepFailed):
    pass


class BatchesUnavailable(errors.StoreError):
    code = "batches_unavailable"


_TABLE: tuple[tuple[type[errors.SRMError], int, str], ...] = (  # the first match decides
    (errors.Overloaded, 503, "server_overloaded"),  # not 429: TRL retries only 5xx
    (NotAuthorized, 401, "authentication_error"),
    (NotPermitted, 403, "permission_error"),
    (RateLimited, 429, "rate_limit_error"),
    (BodyTooSlow, 408, "invalid_request_error"),
    (errors.NotFound, 404, "not_found_error"),
    (errors.IdInUse, 409, "conflict_error"),
    (Conflict, 409, "conflict_error"),
    (QuotaExceeded, 403, "permission_error"),
    (errors.SwapInProgress, 409, "conflict_error"),
    (WrongContentType, 415, "invalid_request_error"),
    (BodyTooLarge, 413, "invalid_request_error"),
    (errors.RequestError, 400, "invalid_request_error"),
    (errors.EngineUnavailable, 503, "service_unavailable"),
    (errors.TimedOut, 504, "timeout_error"),
    (errors.StoreFull, 507, "api_error"),
    (errors.StoreError, 503, "service_unavailable"),
    (errors.SnapshotError, 503, "service_unavailable"),
    (errors.SRMError, 500, "api_error"),
)
_RETRIED_4XX = {408, 409, 429}
_NOT_RETRIED_5XX = {504, 507}
"""504: a retry would take as long again and only double the load. 507: the disk remains full."""
_SHOWN_PATH = 200
"""Most characters of an unknown path in its error."""
_MOST_PARTS = 8
"""Most segments of an unknown path whose end is looked for among the routes."""
_ENGINE_RESTART_S = 2
"""Seconds after which to try again while the engine is starting or gone."""
_STORE_BACK_S = 10
"""Seconds after which to try again where files cannot be read or written."""


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetail
    type: Literal["error"] = "error"
    """By which Anthropic's clients know an error."""


INTERNAL = ErrorBody(ErrorDetail("internal server error", "api_error", None, "internal_error"))
"""Reply to a request that met a bug of the server; the log has the rest."""


def stopping() -> errors.EngineUnavailable:
    """Return the error for requests that come while the server stops or outlast its wait."""
    return errors.EngineUnavailable("the server is shutting down")


def status_of(error: errors.SRMError) -> int:
    """Return the HTTP status that the error is sent with."""
    status, _ = _status_and_type(error)
    return status


def body_of(error: errors.SRMError) -> ErrorBody:
    """Return the error as it is sent, in a reply or inside a stream."""
    _, kind = _status_and_type(error)
    message = cut(error.message, MAX_MESSAGE)
    return ErrorBody(ErrorDetail(message, kind, getattr(error, "param", None), error.code))


def response(status: int, body: ErrorBody, headers: dict[str, str] | None = None) -> Response:
    """Return an error reply. Tells the SDK not to retry what would fail again in the same way."""
    headers = dict(headers or {})
    if status in _NOT_RETRIED_5XX or (400 <= status < 500 and status not in _RETRIED_4XX):
        headers["x-should-retry"] = "false"
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


def srm_error(error: errors.SRMError) -> Response:
    """Return the reply to a request that ends with this error."""
    headers = {}
    if isinstance(error, errors.Overloaded | RateLimited):
        headers["retry-after"] = str(error.retry_after_s)
    elif isinstance(error, errors.EngineUnavailable):
        headers["retry-after"] = str(_ENGINE_RESTART_S)
    elif isinstance(error, errors.StoreFull):
        pass
    elif isinstance(error, errors.StoreError | errors.SnapshotError):
        headers["retry-after"] = str(_STORE_BACK_S)
    elif isinstance(error, Conflict):  # its cause outlasts the wait of a retry
        headers["x-should-retry"] = "false"
    elif isinstance(error, NotAuthorized):
        headers["www-authenticate"] = "Bearer"
    return response(status_of(error), body_of(error), headers)


async def framework_error(request: Request, error: Exception) -> Response:
    """Handler of what the framework raises itself: unknown route, wrong method."""
    assert isinstance(error, HTTPException)
    status = HTTPStatus(error.status_code)
    kind = "not_found_error" if status == HTTPStatus.NOT_FOUND else "invalid_request_error"
    path = cut(request.url.path, _SHOWN_PATH)
    message = f"{error.detail}: {cut(request.method, _SHOWN_PATH)} {path}"
    headers = dict(error.headers or {})
    if status == HTTPStatus.METHOD_NOT_ALLOWED:  # the router names those of its first route alone
        there = _routes(request, request.scope)
        headers["Allow"] = ", ".join(sorted({name for own in there for name in own.methods or ()}))
    if way := here(request.url.path):
        message += f": {way}"
    elif status == HTTPStatus.NOT_FOUND and (meant := _path_meant(request)):
        message += f"; did you mean {meant}?"
    elif allowed := headers.get("Allow"):
        message += f"; it takes {allowed}"
    body = ErrorBody(ErrorDetail(message, kind, None, status.name.lower()))
    return response(status, body, headers)


def _routes(request: Request, scope: Scope) -> list[Any]:
    return [route for route in request.app.routes if route.matches(scope)[0] is not Match.NONE]


def _path_meant(request: Request) -> str | None:
    """Return the route's path that this path ends with, with or without /v1 before it."""
    parts = request.url.path.split("/")[1:]
    if len(parts) > _MOST_PARTS:
        return None
    for begin in range(len(parts)):
        end = "/".join(["", *parts[begin:]])
        for path in (f"/v1{end}", end):
            scope = {**request.scope, "path": path, "root_path": ""}
            if end != "/" and _routes(request, scope):
                return path
    return None


def _status_and_type(error: errors.SRMError) -> tuple[int, str]:
    return next((status, name) for kind, status, name in _TABLE if isinstance(error, kind))
