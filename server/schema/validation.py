"""A request's body, query or form, checked field by field against the struct that says what may be.

Null is the same as absent. A field that is not understood, or that asks for what the server does
not do, is refused by name and never ignored. Knows no field.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from functools import cache
from typing import Any, TypeVar, get_type_hints

import msgspec
from msgspec import inspect

from engine.errors import UNDECODABLE, InvalidRequest

_LONGEST_NAME = 64
"""Most characters of an unknown field's name that known ones are compared with."""


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
    """Return the request made of the fields given; those in `converted` have been checked already.

    `neutral` has fields that the struct does not have, with the values that ask for nothing.

    Raises InvalidRequest naming field and value.
    """
    hints = hints_of(kind)
    fields = dict(converted)
    for name, value in given.items():
        if name in converted:
            continue
        if name in hints:
            fields[name] = _convert(kind, name, value)
        elif name not in neutral:
            raise _unknown(name, [*hints, *neutral])
    for name, values in neutral.items():  # in this order: the first says most
        if name in given:
            _check_neutral(name, given[name], values)
    own = _fields(kind)
    request = kind(**{own[name].name: value for name, value in fields.items()})
    request.check()
    return request


def from_text(kind: type[_Asked], given: Iterable[tuple[str, str]]) -> _Asked:
    """The struct that the named texts make. Raises InvalidRequest naming parameter and value."""
    hints = hints_of(kind)
    fields = _fields(kind)
    found = {}
    for name, text in given:
        if name not in fields:
            raise InvalidRequest(f"{name[:80]!r} is not a parameter of this request", name[:80])
        field = fields[name]
        if field.name in found:
            raise InvalidRequest(f"{name} is given twice", name)
        value = _from_text(text, hints[name])
        if value is None:
            raise refused(kind, name, text)
        found[field.name] = value
    for name, field in fields.items():
        if field.required and field.name not in found:
            raise InvalidRequest(f"{name} is required: {allowed(hints[name])}", name)
    request = kind(**found)
    request.check()
    return request


def require(given: dict[str, Any], name: str, meaning: str = "") -> None:
    """Raise InvalidRequest for a field that is missing, or the one that is a misspelling of it."""
    if name not in given:
        for other in get_close_matches(
            name, [one for one in given if len(one) <= _LONGEST_NAME], 1
        ):
            raise _unknown(other, [name])
        raise InvalidRequest(f"{name} is required{meaning and f': {meaning}'}", name)


def _unknown(name: str, known: list[str]) -> InvalidRequest:
    close = get_close_matches(name, known, 1) if len(name) <= _LONGEST_NAME else []
    meant = f"; did you mean {close[0]!r}?" if close else ""
    return InvalidRequest(f"{name[:_LONGEST_NAME]!r} is not a field of this request{meant}", name)


@cache
def hints_of(kind: type[Fields]) -> dict[str, Any]:
    """The annotation of every field, whole, by its name on the wire."""
    hints = get_type_hints(kind, include_extras=True)
    return {name: hints[field.name] for name, field in _fields(kind).items()}


@cache
def _fields(kind: type[Fields]) -> dict[str, msgspec.structs.FieldInfo]:
    """Return the fields by their names on the wire."""
    return {field.encode_name: field for field in msgspec.structs.fields(kind)}


def refused(kind: type[Fields], name: str, value: Any) -> InvalidRequest:
    """Return the error for a value that a field of a request may not have."""
    hint = hints_of(kind)[name]
    return InvalidRequest(f"{name} must be {allowed(hint)}; got {show(value)}", name)


def _json_object(body: bytes) -> dict[str, Any]:
    if not body.strip():
        raise InvalidRequest("the body is empty; it must be a JSON object")
    try:
        value = msgspec.json.decode(body)
    except UNDECODABLE as error:
        raise InvalidRequest(f"the body is not JSON in UTF-8: {fault_in(body, error)}") from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"the body must be a JSON object; got {show(value)}")
    return value


def fault_in(data: bytes, error: Exception) -> str:
    """Why data is not JSON in UTF-8. A decoder of JSON counts bytes from where a string begins."""
    try:
        data.decode()
    except UnicodeDecodeError as undecodable:
        return str(undecodable)
    return str(error)


def convert(value: Any, hint: Any) -> Any:
    """A value from JSON as annotated; 16.0 is an integer too. Raises msgspec.ValidationError."""
    try:
        return msgspec.convert(value, hint, str_keys=True)
    except msgspec.ValidationError:
        return msgspec.convert(_integral(value), hint, str_keys=True)


def _integral(value: Any, depth: int = 2) -> Any:
    """Replace floats that are whole numbers by integers, in lists of lists too."""
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


@cache
def allowed(hint: Any) -> str:
    """Return in words which values a field may have, for error messages and the OpenAPI document.

    That is the description in its annotation, or else its type and range.
    """
    options = getattr(inspect.type_info(hint), "types", (inspect.type_info(hint),))
    kind = next(one for one in options if not isinstance(one, inspect.NoneType))
    if isinstance(kind, inspect.Metadata):
        return str((kind.extra_json_schema or {})["description"])
    if isinstance(kind, inspect.LiteralType):
        return " or ".join(map(str, kind.values))
    what = _IN_WORDS[type(kind)]
    ends = (getattr(kind, "ge", None), getattr(kind, "le", None))
    low, high = (f"{end:g}" if isinstance(end, float) else end for end in ends)
    if low is None:
        return what
    return f"{what} of at least {low}" if high is None else f"{what} from {low} to {high}"


_IN_WORDS: dict[Any, str] = {
    inspect.BoolType: "true or false",
    inspect.IntType: "an integer",
    inspect.FloatType: "a number",
    inspect.StrType: "a string",
    inspect.DictType: "an object",
}


def _check_neutral(name: str, value: Any, neutral: tuple[Any, ...]) -> None:
    for one in neutral:
        if value == one and isinstance(value, bool) == isinstance(one, bool):
            return
    raise InvalidRequest(
        f"{name} = {show(value)} is not supported; "
        + (f"leave it out or send {show(neutral[0])}" if neutral else "leave it out"),
        name,
    )


def _from_text(text: str, hint: Any) -> Any:
    """Return the value, or None if invalid; so is the text `null`, which msgspec reads as None."""
    try:
        return msgspec.convert(text, hint, strict=False)
    except msgspec.ValidationError:
        return None


def show(value: Any) -> str:
    """A value as JSON, cut to what fits a message."""
    if isinstance(value, list | dict) and len(value) > 16:
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    try:
        text = msgspec.json.encode(value).decode()
    except RecursionError:  # it could be read, a few calls further up
        return "a value in too many others"
    return text if len(text) <= 80 else text[:80] + "…"
