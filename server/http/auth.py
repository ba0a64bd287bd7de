"""Who may ask, for what, and how much of it: decided before anything of a body is read.

ASGI middleware: the port's own routes, API keys, limits of keys, connections and bodies. Errors
from here on inwards become replies here, so CORS headers, which are made outside, are on them too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from starlette.types import ASGIApp, Receive, Scope, Send

from srm.engine.errors import ConfigError, InvalidRequest, NotFound, Overloaded, SRMError
from srm.server import errors
from srm.server.errors import NotAuthorized, NotPermitted
from srm.server.http.bodies import BodyLimits, CountedBody, is_upload
from srm.server.http.cors import Origins, is_loopback
from srm.server.http.draining import READING, Draining
from srm.server.http.headers import headers_of
from srm.server.http.keys import ApiKey, Keys
from srm.server.http.limits import Limits
from srm.server.http.request_log import CURRENT
from srm.server.wiring import ServerWiring

PROBES = frozenset({"/health", "/ready", "/ping"})
"""Paths answered to everybody, however full the server is: they reveal nothing but its health."""
METRICS = "/metrics"
ADMIN = frozenset({"/", METRICS})
ADMIN_FOLDERS = ("/dashboard/",)
"""Paths for the operator: on `admin_port` where there is one, and without a key there."""
OPERATOR_FOLDER = "/v1/admin/"
"""Paths that change the server: on `admin_port` if there is one; without keys, only there."""
TRAINER_PATHS = frozenset(
    {
        *("/pause", "/resume", "/update_weights", "/abort_requests", "/reset_prefix_cache"),
        *("/pause_generation", "/continue_generation", "/update_weights_from_disk"),
        *("/abort_request", "/flush_cache"),
    }
)
"""What trainers ask of the operator's: on `admin_port`, and with `trainer_routes` on `port` too."""
OPERATOR_KEY = "admin"
"""Name of the operator's key; further ones are called `admin-…`."""
WORKER_FOLDER = "/v1/worker"
"""Paths by which another server sends lines of its batches."""
WORKER_KEY = "worker"
"""Name of the key that they want, if there are keys; further ones are called `worker-…`."""
BY_WAY = ("origin", "forwarded", "x-forwarded-for")
"""Headers that show that a web page or a proxy sent the request, and not the operator."""
OPEN = frozenset({"/", "/docs", "/openapi.json"})
OPEN_FOLDERS = (*ADMIN_FOLDERS, "/docs/")
"""Pages without secrets, requested before a browser can send a key."""
TOO_MANY_CONNECTIONS = "too_many_connections"
"""Set in a scope's state by `server.http.connection`."""


class Auth:
    """Middleware around the routes."""

    def __init__(
        self,
        app: ASGIApp,
        config: ServerWiring,
        keys: Keys,
        retry_after_s: Callable[[], int],
        draining: Draining,
    ) -> None:
        self._app = app
        self._draining = draining
        self._keys = keys
        self._admin_port = config.admin_port
        hosts = config.host, config.admin_host, *config.allowed_hosts
        self._has_trainer_routes = config.trainer_routes
        if config.trainer_routes and not keys:
            raise ConfigError(
                "trainer_routes = true lets whoever reaches the port change weights: it needs API "
                f"keys, one of them called {OPERATOR_KEY}"
            )
        self._origins = Origins(config.cors_origins, hosts)
        self._is_local = is_loopback(config.host)
        self._is_admin_local = is_loopback(config.admin_host)
        self._limits = Limits(
            config.requests_per_minute,
            config.tokens_per_minute,
            config.limits_fd,
            first=config.priority_keys,
        )
        self._max_connections = config.max_connections
        self.intake = BodyLimits(
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
        body = CountedBody(self.intake, receive, is_upload(scope))
        try:
            body.owner = self._admit(scope)
            await self._app(scope, body, send)
        except SRMError as error:
            if CURRENT.get().status:  # too late for another reply
                raise
            await errors.srm_error(error)(scope, receive, send)
        finally:
            body.close()

    def _admit(self, scope: Scope) -> str:
        """Check a request before its body is read; return the name of its key, empty without one.
        Raises the SRMError to answer with."""
        path: str = scope["path"]
        if path in PROBES:
            return ""
        headers = headers_of(scope)
        _, port = scope["server"] or ("", None)  # a Unix socket has none
        is_admin_port = bool(self._admin_port) and port == self._admin_port
        is_local = self._is_admin_local if is_admin_port else self._is_local
        is_keyless = not self._keys or (is_admin_port and is_local)
        if is_keyless and (is_local or path != METRICS):  # scraped from elsewhere by any name
            self._origins.check_host(headers.get("host", ""))
        self._origins.check(headers)
        is_trainers = path in TRAINER_PATHS
        is_elsewhere = is_trainers and not self._has_trainer_routes
        if self._admin_port and (_is_admin(path) or is_elsewhere) and not is_admin_port:
            more = ", and with trainer_routes on this one too" if is_trainers else ""
            raise NotFound(f"{path} is answered on another port, admin_port{more}")
        if is_elsewhere and not is_admin_port:
            raise NotPermitted(
                f"{path} is answered on admin_port, and on this port with trainer_routes: start "
                "the server with --admin-port PORT, or --trainer-routes, --weights-dir and keys"
            )
        if scope["method"] not in READING:
            self._draining.check()
        if scope.get("state", {}).get(TOO_MANY_CONNECTIONS):
            raise Overloaded(f"there are more than {self._max_connections} connections")
        key = None
        if self._keys and not _is_open(path, is_admin_port):
            given = headers.get("authorization") or f"Bearer {headers.get('x-api-key', '')}"
            key = self._check_key(given, scope["method"])
        if path.startswith(OPERATOR_FOLDER) or is_trainers:
            _check_operator(scope, headers, key, is_admin_port)
        if path.startswith(WORKER_FOLDER) and key is not None:
            _check_name(path, key, WORKER_KEY)
        encoding = headers.get("content-encoding", "identity")
        if encoding != "identity":
            raise InvalidRequest(
                f"content-encoding must be left out; got {encoding[:80]!r}", "content-encoding"
            )
        owner = "" if key is None else key.name
        self.intake.check_announced(headers.get("content-length", ""), is_upload(scope), owner)
        return owner

    def _check_key(self, authorization: str, method: str) -> ApiKey:
        scheme, _, given = authorization.partition(" ")
        key = self._keys.find(given.strip()) if scheme.lower() == "bearer" else None
        if key is None:
            problem = "is not one of this server's" if given else "is missing"
            raise NotAuthorized(f"the API key {problem}; send `Authorization: Bearer KEY`")
        account = self._limits.account(key.name)
        CURRENT.get().account = account
        if method == "POST":
            account.admit()
        return key


def _is_admin(path: str) -> bool:
    return path in ADMIN or path.startswith((*ADMIN_FOLDERS, OPERATOR_FOLDER))


def _is_open(path: str, is_admin_port: bool) -> bool:
    is_page = path in OPEN or path.startswith(OPEN_FOLDERS)
    return is_page or (is_admin_port and path in ADMIN)


def _check_name(path: str, key: ApiKey, name: str) -> None:
    if key.name != name and not key.name.startswith(f"{name}-"):
        raise NotPermitted(
            f"{path} wants a key whose name is {name} or begins with {name}-; this one is called "
            f"{key.name!r}"
        )


def _check_operator(
    scope: Scope, headers: Mapping[str, str], key: ApiKey | None, is_admin_port: bool
) -> None:
    """Raise NotPermitted unless the operator asks. With keys, that takes the operator's key;
    without, the client must be on this machine and use `admin_port`, since a request to the other
    port may come through a proxy that does not say so."""
    if key is not None:
        _check_name(scope["path"], key, OPERATOR_KEY)
        return
    if not is_admin_port:
        raise NotPermitted(
            f"{scope['path']} is answered on admin_port alone, where the server has no keys, and "
            "it has no admin_port: start it with --admin-port PORT, or with keys"
        )
    by_way = [name for name in BY_WAY if name in headers]
    if by_way or not is_loopback((scope.get("client") or ("",))[0]):
        raise NotPermitted(
            f"{scope['path']} is answered to programs on this machine alone, where the server has "
            "no keys; " + (f"the request has a header {by_way[0]}" if by_way else "you are not")
        )
