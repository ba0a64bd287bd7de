"""Parameters that come as text, of a query or a form, checked against the struct that has them.

Each may be given once, and one that is not understood is refused by name. Knows no field.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec

from engine.errors import InvalidRequest
from server.schema.validation import Fields, allowed, hints_of, show

_Asked = TypeVar("_Asked", bound=Fields)


def from_text(kind: type[_Asked], given: Iterable[tuple[str, str]]) -> _Asked:
    """The struct that the named texts make. Raises InvalidRequest naming parameter and value."""
    hints = hints_of(kind)
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    found = {}
    for name, text in given:
        if name not in fields:
            raise InvalidRequest(f"{name[:80]!r} is not a parameter of this request", name[:80])
        field = fields[name]
        if field.name in found:
            raise InvalidRequest(f"{name} is given twice", name)
        value = _converted(text, hints[name])
        if value is None:
            must = allowed(hints[name])
            raise InvalidRequest(f"{name} must be {must}; got {show(text)}", name)
        found[field.name] = value
    for name, field in fields.items():
        if field.required and field.name not in found:
            raise InvalidRequest(f"{name} is required: {allowed(hints[name])}", name)
    request = kind(**found)
    request.check()
    return request


def _converted(text: str, hint: Any) -> Any:
    """Return the value, or None if invalid; so is the text `null`, which msgspec reads as None."""
    try:
        return msgspec.convert(text, hint, strict=False)
    except msgspec.ValidationError:
        return None
