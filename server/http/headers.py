"""The headers of a request, decoded once."""

from __future__ import annotations

from starlette.types import Scope

_KEY = "srm.headers"


def headers_of(scope: Scope) -> dict[str, str]:
    """Return a request's headers by lower-case name; of several of a name the first one."""
    found: dict[str, str] | None = scope.get(_KEY)
    if found is None:
        pairs = reversed(scope["headers"])
        found = {name.decode("latin-1"): value.decode("latin-1") for name, value in pairs}
        scope[_KEY] = found
    return found
