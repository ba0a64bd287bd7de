"""Who may ask, for what, and how much of it: decided before anything of a body is read.

ASGI middleware: the port's own routes, API keys, limits of keys, connections and bodies. Errors
from here on inwards become replies here, so CORS headers, which are made outside, are on them too.
"""

from __future__ import annotations

from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.errors import InvalidRequest, NotAuthorized, NotFound, Overloaded, SRMError
from server import errors
from server.config import ServerConfig
from server.draining import READING, Draining
from server.intake import Intake, is_upload
from server.journal import CURRENT
from server.keys import Keys
from server.limits import Limits

PROBES = frozenset({"/health", "/ready", "/ping"})
"""Answered to everybody, however full the server is: they say nothing but that."""
ADMIN = frozenset({"/", "/metrics"})
ADMIN_FOLDERS = ("/dashboard/",)
"""What belongs to the operator: on `admin_port` where there is one, and without a key there."""
OPEN = frozenset({"/", "/docs", "/openapi.json"})
"""Pages without secrets, that a browser asks for before it can send a key; and ADMIN_FOLDERS."""
TOO_MANY_CONNECTIONS = "too_many_connections"
"""Set in a scope's state by `server.connection`."""


class Guard:
    """Middleware around the routes."""

    def __init__(
        self,
        app: ASGIApp,
        config: ServerConfig,
        keys: Keys,
        retry_after_s: Callable[[], int],
        draining: Draining,
    ) -> None:
        self._app = app
        self._draining = draining
        self._keys = keys
        self._admin_port = config.admin_port
        self._limits = Limits(config.requests_per_minute, config.tokens_per_minute)
        self._max_connections = config.max_connections
        self.intake = Intake(
            config.max_body_bytes,
            config.max_waiting_bytes,
            config.receive_timeout_s,
            retry_after_s,
            config.max_file_bytes,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_begun = False

        async def watched_send(message: Message) -> None:
            nonlocal is_begun
            is_begun = True
            await send(message)

        body = self.intake.body(receive, is_upload(scope))
        try:
            self._admit(scope)
            await self._app(scope, body, watched_send)
        except SRMError as error:
            if is_begun:
                raise
            reply = await errors.srm_error(Request(scope), error)
            await reply(scope, receive, send)
        finally:
            body.close()

    def _admit(self, scope: Scope) -> None:
        """Raises the RequestError to answer with."""
        path: str = scope["path"]
        if path in PROBES:
            return
        headers = Headers(scope=scope)
        self._check_port(scope, path)
        if scope["method"] not in READING:
            self._draining.check()
        if scope.get("state", {}).get(TOO_MANY_CONNECTIONS):
            raise Overloaded(f"there are more than {self._max_connections} connections")
        if self._keys and not self._is_open(scope, path):
            self._check_key(headers.get("authorization", ""), scope["method"])
        encoding = headers.get("content-encoding", "identity")
        if encoding != "identity":
            raise InvalidRequest(
                f"content-encoding must be left out; got {encoding[:80]!r}", "content-encoding"
            )
        self.intake.check_announced(headers.get("content-length", ""), is_upload(scope))

    def _check_port(self, scope: Scope, path: str) -> None:
        if self._admin_port and _is_admin(path) and not self._is_admin_port(scope):
            raise NotFound(f"{path} is answered on another port, admin_port")

    def _is_admin_port(self, scope: Scope) -> bool:
        return bool(self._admin_port) and scope["server"][1] == self._admin_port

    def _is_open(self, scope: Scope, path: str) -> bool:
        if path in OPEN or path.startswith(ADMIN_FOLDERS):
            return True
        return _is_admin(path) and self._is_admin_port(scope)

    def _check_key(self, authorization: str, method: str) -> None:
        scheme, _, given = authorization.partition(" ")
        key = self._keys.find(given.strip()) if scheme.lower() == "bearer" else None
        if key is None:
            problem = "is not one of this server's" if given else "is missing"
            raise NotAuthorized(f"the API key {problem}; send `Authorization: Bearer KEY`")
        account = self._limits.account(key.name)
        CURRENT.get().account = account
        if method == "POST":
            account.admit_now()


def _is_admin(path: str) -> bool:
    return path in ADMIN or path.startswith(ADMIN_FOLDERS)
