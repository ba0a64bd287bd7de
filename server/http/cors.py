"""Checks web pages: which may ask, under which host names, and what other origins may read.

A browser sends what any page asks for, to servers on its own machine too, and names the page in
`Origin`; programs send none. A page whose name was given our address meanwhile (DNS rebinding) is
of our own origin, and the name in `Host` gives it away: it has no key, so the name is looked at
where none is wanted. Refusals have our error shape.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping, Sequence
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp

from srm.errors import InvalidRequest
from srm.server import errors
from srm.server.errors import NotPermitted
from srm.server.schema.openapi import Operation

EXPOSED = ("x-request-id", "x-srm-not-enforced", "retry-after", "x-should-retry")
"""Reply headers that a page may read."""
NOBODYS = (".localhost", ".internal")
"""Suffixes of host names that no page can have; containers reach their host by such names."""


class Origins:
    """Origins of pages that may ask; `hosts` are our names, and `*.NAME` for all below one."""

    def __init__(self, allowed: Sequence[str], hosts: Iterable[str]) -> None:
        self._allowed = frozenset(allowed)
        own = (_name(_authority(origin)) for origin in allowed)
        names = [*map(str.lower, hosts), *own]
        self._names = frozenset({"", "localhost", *names})
        self._below = (*NOBODYS, *(name[1:] for name in names if name.startswith("*.")))

    def check(self, headers: Mapping[str, str]) -> None:
        """Raises NotPermitted for a page of an origin that is neither ours nor allowed."""
        origin = headers.get("origin")
        if origin is None or self._allowed & {origin, "*"}:
            return
        # The scheme may be that of a proxy in front.
        own = _authority(origin).lower()
        if not own or own != headers.get("host", "").lower():
            raise NotPermitted(
                f"pages of origin {origin[:80]!r} may not ask: it is neither this server's own, "
                f"http://{headers.get('host', '')[:80]}, nor one of cors_origins"
            )

    def check_host(self, host: str) -> None:
        """Raises NotPermitted for a name that somebody may have given to an address of ours."""
        name = _name(host).removesuffix(".")
        if not ("*" in self._allowed or name in self._names or _is_address(name)
                or name.endswith(self._below)):  # fmt: skip
            raise NotPermitted(
                f"host {host[:80]!r} is not known to be a name of this server, which asks for no "
                "key: use its address, start it with the name in allowed_hosts "
                "(--allowed-hosts, SRM_ALLOWED_HOSTS), or with keys"
            )


def is_loopback(host: str) -> bool:
    """Whether an address, or each of a name, is reached from this machine only; "" means all."""
    if _is_address(host):
        address = ip_address(host)
        return (getattr(address, "ipv4_mapped", None) or address).is_loopback
    try:
        addresses = socket.getaddrinfo(host, None) if host else []
    except (OSError, UnicodeError):  # nobody can listen on that
        return False
    return bool(addresses) and all(is_loopback(str(address[0])) for *_, address in addresses)


def _authority(origin: str) -> str:
    """Return the origin's host, and its port if that is not the scheme's default."""
    return origin.partition("://")[2]


def _name(authority: str) -> str:
    try:
        return urlsplit(f"//{authority}").hostname or ""
    except ValueError:
        return authority


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


class Cors(CORSMiddleware):
    """Starlette's CORS middleware, for the methods that this server takes."""

    def __init__(
        self, app: ASGIApp, origins: Sequence[str], operations: Iterable[Operation]
    ) -> None:
        super().__init__(
            app,
            allow_origins=origins,
            allow_methods=sorted({"HEAD", *(operation.method for operation in operations)}),
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
