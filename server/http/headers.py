"""The head of a request: checked once, and its headers decoded once."""

from __future__ import annotations

import re
from collections.abc import Sequence

from starlette.types import Scope

Headers = Sequence[tuple[bytes, bytes]]
_KEY = "srm.headers"
_HOST = re.compile(rb"(?:\[[0-9A-Fa-f:.]+\]|[\w.~!$&'()*+;=%-]*)(?::[0-9]{0,5})?", re.ASCII)
"""RFC 9112, 3.2, but for commas: some would read a list there."""
_URL = re.compile(rb"https?://([^/?#@]*)([^#]*)", re.IGNORECASE)


def headers_of(scope: Scope) -> dict[str, str]:
    """Return a request's headers by lower-case name; of several of a name the first one."""
    headers: dict[str, str] | None = scope.get(_KEY)
    if headers is None:
        pairs = reversed(scope["headers"])
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in pairs}
        scope[_KEY] = headers
    return headers


def check_head(method: bytes, version: str, headers: Headers) -> bool:
    """Return whether the body comes in chunks.

    Raises ValueError for what llhttp lets through and RFC 9112 has refused: whoever forwards the
    request may read it in another way. Names are in lower case.
    """
    if version not in {"1.1", "1.0"}:
        raise ValueError(f"the version must be 1.1 or 1.0, got {version}")
    if method == b"CONNECT":
        raise ValueError("CONNECT is for proxies, and this is none")
    names = [name for name, _ in headers]
    num_hosts = names.count(b"host")
    if num_hosts > 1 or (num_hosts == 0 and version == "1.1"):
        raise ValueError(f"there must be one Host, got {num_hosts}")
    if num_hosts and not _HOST.fullmatch(host := headers[names.index(b"host")][1]):
        raise ValueError(f"Host must be a name or an address, and a port; got {host[:80]!r}")
    if b"transfer-encoding" not in names:
        return False
    codings = _values(b"transfer-encoding", headers)
    if version == "1.0" or [coding.lower() for coding in codings] != [b"chunked"]:
        got = b", ".join(codings)[:80]
        raise ValueError(
            f"Transfer-Encoding must be chunked, in HTTP/1.1; got {got!r} in {version}"
        )
    return True


def path_of(target: bytes, headers: Headers) -> bytes:
    """Return path and query of a target that is a whole URL, or `*`.

    Raises ValueError if it is neither, or the URL's host is another than that of `Host`.
    """
    if target == b"*":
        return target
    url = _URL.fullmatch(target)
    if url is None:
        raise ValueError(f"the target must be a path, got {target[:80]!r}")
    host, path = url.groups()
    if [host.lower()] != [value.lower() for value in _values(b"host", headers)]:
        raise ValueError(f"Host must be that of the target, got another than {host[:80]!r}")
    return path if path.startswith(b"/") else b"/" + path


def _values(wanted: bytes, headers: Headers) -> list[bytes]:
    return [value for name, value in headers if name == wanted]
