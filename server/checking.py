"""A request's body, checked field by field against the struct that says what is allowed.

Null is the same as absent. A field that is not understood, or that asks for what the server does
not do, is refused by name and never ignored. Knows no field.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from engine.errors import InvalidRequest


class Fields(msgspec.Struct, frozen=True, kw_only=True):
    """A request's body, checked. The description of a field is what it allows."""

    def check(self) -> None:
        """Raise InvalidRequest for fields that do not go together."""


_Asked = TypeVar("_Asked", bound=Fields)


def given_fields(body: bytes) -> dict[str, Any]:
    """The fields of a body that are not null. Raises InvalidRequest if it is no JSON object."""
    return {name: value for name, value in _json_object(body).items() if value is not None}


def checked(
    kind: type[_Asked],
    given: dict[str, Any],
    converted: dict[str, Any],
    neutral: dict[str, tuple[Any, ...]],
) -> _Asked:
    """The request that the fields given make; those in `converted` have been checked already.

    `neutral` has fields that are no part of it, with the values that ask for nothing.

    Raises InvalidRequest naming field and value.
    """
    hints = hints_of(kind)
    fields = dict(converted)
    for name, value in given.items():
        if name in converted:
            continue
        if name in hints:
            fields[name] = _convert(kind, name, value)
        elif name in neutral:
            _check_neutral(name, value, neutral[name])
        else:
            raise InvalidRequest(f"{name!r} is not a field of this request", name)
    request = kind(**fields)
    request.check()
    return request


@cache
def hints_of(kind: type[Fields]) -> dict[str, Any]:
    """The annotation of every field, whole."""
    return get_type_hints(kind, include_extras=True)


def refused(kind: type[Fields], name: str, value: Any) -> InvalidRequest:
    """That a field of a request may not have a value."""
    hint = hints_of(kind)[name]
    return InvalidRequest(f"{name} must be {allowed(hint)}; got {show(value)}", name)


def _json_object(body: bytes) -> dict[str, Any]:
    if not body.strip():
        raise InvalidRequest("the body is empty; it must be a JSON object")
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not JSON in UTF-8: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"the body must be a JSON object; got {show(value)}")
    return value


def convert(value: Any, hint: Any) -> Any:
    """A value from JSON as annotated; 16.0 is an integer too. Raises msgspec.ValidationError."""
    try:
        return msgspec.convert(value, hint, str_keys=True)
    except msgspec.ValidationError:
        return msgspec.convert(_integral(value), hint, str_keys=True)


def _integral(value: Any, depth: int = 2) -> Any:
    """With integers for the floats that are some, in lists of lists too."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list) and depth:
        return [_integral(one, depth - 1) for one in value]
    return value


def _convert(kind: type[Fields], name: str, value: Any) -> Any:
    try:
        return convert(value, hints_of(kind)[name])
    except msgspec.ValidationError:
        raise refused(kind, name, value) from None


def allowed(hint: Any) -> str:
    """The description in a field's annotation."""
    optional = next((arg for arg in get_args(hint) if get_origin(arg) is Annotated), hint)
    meta = get_args(hint if get_origin(hint) is Annotated else optional)[-1]
    return str(meta.description)


def _check_neutral(name: str, value: Any, neutral: tuple[Any, ...]) -> None:
    for one in neutral:
        if value == one and isinstance(value, bool) == isinstance(one, bool):
            return
    raise InvalidRequest(
        f"{name} = {show(value)} is not supported; "
        + (f"leave it out or send {show(neutral[0])}" if neutral else "leave it out"),
        name,
    )


def show(value: Any) -> str:
    """A value as JSON, cut to what fits a message."""
    if isinstance(value, list | dict) and len(value) > 16:
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    try:
        text = msgspec.json.encode(value).decode()
    except RecursionError:  # it could be read, a few calls further up
        return "a value in too many others"
    return text if len(text) <= 80 else text[:80] + "…"
