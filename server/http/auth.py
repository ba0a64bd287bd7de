"""Who may ask, for what, and how much of it: decided before anything of a body is read.

ASGI middleware: the port's own routes, API keys, limits of keys, connections and bodies. Errors
from here on inwards become replies here, so CORS headers, which are made outside, are on them too.

Of bodies the limits count what has arrived and not what was announced, so nobody can take room by
announcing much. A body counts until its request is answered, since it is kept that long. An
uploaded file goes to disk as it comes: it may be larger and takes no room here.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from srm.errors import ConfigError, InvalidRequest, NotFound, Overloaded, SRMError
from srm.server import errors
from srm.server.errors import BodyTooLarge, BodyTooSlow, NotAuthorized, NotPermitted
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
"""Routes of trainers for the operator: on `admin_port`; with `trainer_routes` on `port` too."""
OPERATOR_KEY = "admin"
"""Name of the operator's key; further ones are called `admin-…`."""
BY_WAY = ("origin", "forwarded", "x-forwarded-for")
"""Headers that show that a web page or a proxy sent the request, and not the operator."""
SITE = "sec-fetch-site"
"""Header by which a browser says whose page asks: of images too, that have no origin."""
OPEN = frozenset({"/", "/docs", "/openapi.json"})
OPEN_FOLDERS = (*ADMIN_FOLDERS, "/docs/")
"""Pages without secrets, requested before a browser can send a key."""
TOO_MANY_CONNECTIONS = "too_many_connections"
"""Set in a scope's state by `server.http.connection`."""


LEAST_BYTES_PER_S = 16 * 1024
"""Every so many bytes that arrive give back a second of a body's time limit, and never more than
was used of it: what has arrived buys no later silence."""

FORM_BYTES = 64 * 1024
"""Most bytes of an upload besides the file: the other fields, and what separates them."""
UPLOADS = "/v1/files"
"""Path where the body of a POST is a form with a file."""


def is_upload(scope: Scope) -> bool:
    return bool(scope["path"] == UPLOADS and scope["method"] == "POST")


class BodyLimits:
    """Limits the request bodies that one process holds."""

    def __init__(
        self,
        max_body_bytes: int,
        max_held_bytes: int,
        timeout_s: float,
        retry_after_s: Callable[[], int],
        max_file_bytes: int = 0,
    ) -> None:
        self.held_bytes = 0
        self.held_by: Counter[str] = Counter()
        """Bytes held for each key, by its name."""
        self._max_file_bytes = max_file_bytes
        self._max_body_bytes = max_body_bytes
        self._max_held_bytes = max_held_bytes
        self.timeout_s = timeout_s
        self._retry_after_s = retry_after_s

    def check_announced(
        self, content_length: str, is_upload: bool = False, owner: str = ""
    ) -> None:
        """Refuse a body by its content-length, before it is read, if it would be refused then.
        Raises BodyTooLarge and Overloaded."""
        num_bytes = int(content_length[:19]) if content_length.isdecimal() else 0
        if num_bytes > self.limit(is_upload):
            raise self.too_large(is_upload)
        if content_length not in {"", "0"} and not is_upload:
            self.check_room(owner)

    def limit(self, is_upload: bool) -> int:
        """Return the most bytes of a body; for an upload, of the file and the form around it."""
        return self._max_file_bytes + FORM_BYTES if is_upload else self._max_body_bytes

    def check_room(self, owner: str = "", own_bytes: int = 0) -> None:
        """Raise Overloaded if all hold too much, or one key more than half of it in other bodies
        than one of `own_bytes`: a key's first body always has its part. Without keys, `owner` is
        empty and there is no such part."""
        if self.held_bytes > self._max_held_bytes:
            raise Overloaded(
                f"requests hold {self.held_bytes} of at most {self._max_held_bytes} bytes",
                self._retry_after_s(),
            )

        held, part = self.held_by[owner], self._max_held_bytes // 2
        if owner and held > part and held > own_bytes:
            raise Overloaded(
                f"requests of this key hold {held} of at most {part} bytes", self._retry_after_s()
            )

    def too_large(self, is_upload: bool) -> BodyTooLarge:
        if is_upload:
            return BodyTooLarge(f"the file is larger than max_file_bytes = {self._max_file_bytes}")
        return BodyTooLarge(f"the body is larger than {self._max_body_bytes} bytes")


class CountedBody:
    """The `receive` of one request, with limits on size and time; it must be closed in the end."""

    def __init__(self, limits: BodyLimits, receive: Receive, is_upload: bool = False) -> None:
        self.num_bytes = 0
        self.is_upload = is_upload
        self.owner = ""
        """Name of the key that sends it; set before it is read."""
        self.is_operators = False
        """Whether it is taken however much others hold; set before it is read."""
        self._limits = limits
        self._receive = receive
        self.left_s = limits.timeout_s
        """Seconds that may still be waited for its bytes."""
        self._is_whole = False

    async def __call__(self) -> Message:
        """Return the next message. Raises BodyTooSlow, BodyTooLarge, Overloaded until the last."""
        if self._is_whole:
            return await self._receive()
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            async with asyncio.timeout(self.left_s):
                message = await self._receive()
        except TimeoutError:
            raise BodyTooSlow(f"only {self.num_bytes} bytes of the body came in time") from None
        if message["type"] == "http.request":
            self._is_whole = not message.get("more_body", False)
            size = len(message.get("body", b""))
            self.spend(loop.time() - began, size)
            self._count(size)
        return message

    def spend(self, waited_s: float, size: int) -> None:
        """Take the seconds that these bytes were waited for, and give back what they are worth."""
        left_s = self.left_s - waited_s + size / LEAST_BYTES_PER_S
        self.left_s = min(left_s, self._limits.timeout_s)

    def close(self) -> None:
        """Stop counting the body as held."""
        if not self.is_upload:
            self._hold(-self.num_bytes)
        self.num_bytes = 0

    def _count(self, size: int) -> None:
        self.num_bytes += size
        if not self.is_upload:
            self._hold(size)
        if self.num_bytes > self._limits.limit(self.is_upload):
            raise self._limits.too_large(self.is_upload)
        if not self.is_upload and not self.is_operators:
            self._limits.check_room(self.owner, self.num_bytes)

    def _hold(self, size: int) -> None:
        self._limits.held_bytes += size
        self._limits.held_by[self.owner] += size
        if not self._limits.held_by[self.owner]:
            del self._limits.held_by[self.owner]


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
            shares_prompts=config.share_prompts,
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
            body.is_operators = _is_operators(scope["path"])
            await self._app(scope, body, send)
        except SRMError as error:
            if CURRENT.get().status:  # too late for another reply
                raise
            await errors.srm_error(error)(scope, receive, send)
        finally:
            if (entry := CURRENT.get(None)) is None or (task := entry.goes_on) is None:
                body.close()
            else:
                self._draining.tasks.add(task)
                task.add_done_callback(self._draining.tasks.discard)
                task.add_done_callback(lambda _: body.close())

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
        is_keyless = not self._keys.all or (is_admin_port and is_local)
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
        if self._draining.is_on and scope["method"] not in READING:
            raise errors.stopping()
        # What waits in a pause may fill all there is, and would keep out whoever is to end it.
        is_operators = _is_operators(path)
        if scope.get("state", {}).get(TOO_MANY_CONNECTIONS) and not is_operators:
            raise Overloaded(f"there are more than {self._max_connections} connections")
        key = None
        if self._keys.all and not _is_open(path, is_admin_port):
            given = headers.get("authorization") or f"Bearer {headers.get('x-api-key', '')}"
            key = self._check_key(given, is_counted=scope["method"] == "POST" and not is_operators)
        if is_operators:
            _check_operator(scope, headers, key, is_admin_port)
        encoding = headers.get("content-encoding", "identity")
        if encoding != "identity":
            raise InvalidRequest(
                f"content-encoding must be left out; got {encoding[:80]!r}", "content-encoding"
            )
        owner = "" if key is None else key.name
        if not is_operators:
            length = headers.get("content-length", "")
            self.intake.check_announced(length, is_upload(scope), owner)
        return owner

    def _check_key(self, authorization: str, is_counted: bool) -> ApiKey:
        scheme, _, given = authorization.partition(" ")
        key = self._keys.find(given.strip()) if scheme.lower() == "bearer" else None
        if key is None:
            problem = "is not one of this server's" if given else "is missing"
            raise NotAuthorized(f"the API key {problem}; send `Authorization: Bearer KEY`")
        account = self._limits.account(key.name)
        CURRENT.get().account = account
        if is_counted:
            account.admit()
        return key


def _is_admin(path: str) -> bool:
    return path in ADMIN or path.startswith((*ADMIN_FOLDERS, OPERATOR_FOLDER))


def _is_operators(path: str) -> bool:
    """Whether a path is answered to the operator alone, however full the server is."""
    return path in TRAINER_PATHS or path.startswith(OPERATOR_FOLDER)


def _is_open(path: str, is_admin_port: bool) -> bool:
    is_page = path in OPEN or path.startswith(OPEN_FOLDERS)
    return is_page or (is_admin_port and path in ADMIN)


def _check_operator(
    scope: Scope, headers: Mapping[str, str], key: ApiKey | None, is_admin_port: bool
) -> None:
    """Raise NotPermitted unless the operator asks. With keys, that takes the operator's key;
    without, the client must be on this machine and use `admin_port`, since a request to the other
    port may come through a proxy that does not say so."""
    if key is not None:
        if key.name != OPERATOR_KEY and not key.name.startswith(f"{OPERATOR_KEY}-"):
            raise NotPermitted(
                f"{scope['path']} wants a key whose name is {OPERATOR_KEY} or begins with "
                f"{OPERATOR_KEY}-; this one is called {key.name!r}"
            )
        return
    if not is_admin_port:
        raise NotPermitted(
            f"{scope['path']} is answered on admin_port alone, where the server has no keys, and "
            "it has no admin_port: start it with --admin-port PORT, or with keys"
        )
    by_way = [name for name in BY_WAY if name in headers]
    if headers.get(SITE, "none") not in {"none", "same-origin"}:
        by_way.append(SITE)
    if by_way or not is_loopback((scope.get("client") or ("",))[0]):
        raise NotPermitted(
            f"{scope['path']} is answered to programs on this machine alone, where the server has "
            "no keys; " + (f"the request has a header {by_way[0]}" if by_way else "you are not")
        )
