"""A request's body, query or form, checked field by field against the struct that says what may be.

Null is the same as absent. A field that is not understood, or that asks for what the server does
not do, is refused by name and never ignored. Values are decoded field by field, each by what it may
be, so what is refused is never made.
"""

from __future__ import annotations

import re
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any, ClassVar, TypeVar, get_type_hints

import msgspec
from msgspec import NODEFAULT, Raw, inspect

from srm.errors import (
    UNDECODABLE,
    InvalidRequest,
    RequestError,
    cut,
    did_you_mean,
    in_words,
    not_utf8,
)
from srm.server.elsewhere import FIELDS
from srm.server.schema.json_parts import (
    MAX_FIELDS,
    MAX_VALUE_BYTES,
    SMALL,
    TooManyFields,
    decoded,
    fields_of,
    first_byte,
    items_of,
    to_json,
    token_ids,
)

_NULL = b"null"
_SHOWN = 80
"""Most characters of a value in a message."""
_SHOWN_FAULT = 160
"""Most characters of what is wrong with an item, which may repeat a value."""
_LONGEST_NAME = 64
"""Most characters of an unknown field's name in a message."""


class Fields(msgspec.Struct, frozen=True, kw_only=True):
    """A request's body, checked. The description of a field is what it allows."""

    successors: ClassVar[Mapping[str, str]] = {}
    """Fields of other requests, with what to do instead."""

    def check(self) -> None:
        """Raise InvalidRequest for fields that do not go together."""


_Asked = TypeVar("_Asked", bound=Fields)


def given_fields(
    body: bytes, kind: type[Fields], neutral: Mapping[str, tuple[Any, ...]]
) -> dict[str, Raw]:
    """The fields of a body that are not null, as their JSON. Raises InvalidRequest if it is no
    object, has more than MAX_FIELDS, or one that neither the struct nor `neutral` has."""
    body = body.removeprefix(BOM_UTF8)  # which Windows puts before files, that curl sends
    if not body.strip():
        raise InvalidRequest("the body is empty; it must be a JSON object")
    try:
        if not body.isascii():
            body.decode()  # of a field that nobody reads, too
        given = not_null(fields_of(body))
    except TooManyFields:
        raise InvalidRequest(f"the body must have at most {MAX_FIELDS} fields") from None
    except msgspec.ValidationError:
        raise InvalidRequest(f"the body must be a JSON object; got {show(Raw(body))}") from None
    except UNDECODABLE as error:
        raise not_json(body, error) from None
    hints = hints_of(kind)
    for name in given:
        if name not in hints and name not in neutral:
            shown = cut(name, _LONGEST_NAME)
            way = _way(name, kind.successors) or did_you_mean(name, [*hints, *neutral])
            raise InvalidRequest(f"{shown!r} is not a field of this request{way}", shown)
    return given


def not_null(fields: dict[str, Raw]) -> dict[str, Raw]:
    """The fields without those that are null."""
    return {
        name: value
        for name, value in fields.items()
        if len(value) != len(_NULL) or bytes(value) != _NULL
    }


def not_json(data: bytes | Raw, error: Exception) -> InvalidRequest:
    """Return the error for a body with these bytes in it, which are not JSON."""
    return InvalidRequest(f"the body is not JSON in UTF-8: {not_utf8(bytes(data)) or error}")


SAMPLING: dict[str, float] = {}
"""The model's own values of what requests leave out, in a process of a server that is to use
them: `tokenizer_files.use_defaults` sets them at its start."""


def checked(
    kind: type[_Asked],
    given: dict[str, Raw],
    converted: dict[str, Any],
    neutral: Mapping[str, tuple[Any, ...]],
) -> _Asked:
    """Return the request made of the fields given; those in `converted` have been checked already.

    `neutral` has fields with the values that ask for nothing; the struct need not have them.

    Raises InvalidRequest naming field and value.
    """
    hints = hints_of(kind)
    fields = {name: value for name, value in SAMPLING.items() if name in hints} | converted
    for name, value in given.items():
        if name in converted:
            continue
        if name in hints:
            try:
                fields[name] = _convert(kind, name, value)
            except InvalidRequest:
                if not is_neutral(value, neutral.get(name, ())):
                    raise
        else:
            check_neutral(name, value, neutral[name], kind.successors)
    own = _fields(kind)
    request = kind(**{own[name].name: value for name, value in fields.items()})
    request.check()
    return request


def from_text(kind: type[_Asked], given: Iterable[tuple[str, str]]) -> _Asked:
    """The struct that the named texts make. Raises InvalidRequest naming parameter and value."""
    hints = hints_of(kind)
    fields = _fields(kind)
    entries = {}
    for name, text in given:
        if name not in fields:
            raise InvalidRequest(f"{name[:80]!r} is not a parameter of this request", name[:80])
        field = fields[name]
        if field.name in entries:
            raise InvalidRequest(f"{name} is given twice", name)
        value = _from_text(text, hints[name])
        if value is None:
            raise refused(kind, name, text)
        entries[field.name] = value
    for name, field in fields.items():
        if field.required and field.name not in entries:
            raise InvalidRequest(f"{name} is required: {allowed(hints[name])}", name)
    request = kind(**entries)
    request.check()
    return request


def require(given: dict[str, Raw], name: str, meaning: str = "") -> None:
    """Raise InvalidRequest for a field that is missing."""
    if name not in given:
        raise InvalidRequest(f"{name} is required{meaning and f': {meaning}'}", name)


def ids_of(given: dict[str, Raw], name: str) -> bytes:
    """Return the token ids of a field, int32 little-endian. Raises InvalidRequest if there are
    none."""
    with reading(name, given[name], "be a list of token ids, not empty"):
        if not (ids := token_ids(given[name])):
            raise msgspec.ValidationError
    return ids


def list_items(value: Raw, name: str, most: int, what: str) -> list[Raw]:
    """Return the items of a field that is a list, each as its JSON. Raises InvalidRequest, which
    says that it must be `what`, if there are none or more than `most`."""
    items = items_of(value, most) if first_byte(value) == b"[" else None
    if not items:
        raise InvalidRequest(f"{name} must be {what}; got {show(value)}", name)
    return items


def reading_item(name: str, i: int, value: Raw, must: str) -> AbstractContextManager[None]:
    """As `reading`, of an item of a list; the InvalidRequest says why, too."""
    return reading(name, value, must, f"[{i}]", says_why=True)


@contextmanager
def reading(
    name: str, value: Raw, must: str, place: str = "", says_why: bool = False
) -> Iterator[None]:
    """Have a ValidationError about a field, or a place in it, and what is no JSON, become an
    InvalidRequest that says what it must be."""
    try:
        yield
    except msgspec.ValidationError as error:
        why = f" ({cut(in_words(error), _SHOWN_FAULT)})" if says_why else ""
        raise InvalidRequest(f"{name}{place} must {must}; got {show(value)}{why}", name) from None
    except UNDECODABLE as error:
        raise not_json(value, error) from None


@contextmanager
def naming(names: Mapping[str, str], words: Mapping[str, str] | None = None) -> Iterator[None]:
    """Let errors about these fields name those that a dialect has in their places. In a message the
    regular expressions of `words` are replaced; by default the names, where they are its first
    word, have an underscore, or a value behind them."""
    try:
        yield
    except RequestError as error:
        if words is None:
            words = {
                rf"\b{ours}\b" if "_" in ours else rf"^{ours}\b|\b{ours}(?= = )": theirs
                for ours, theirs in names.items()
            }
        for word, theirs in words.items():
            error.message = re.sub(word, theirs, error.message)
        error.param = names.get(error.param or "", error.param)
        raise


def _way(name: str, successors: Mapping[str, str]) -> str:
    """Return what does here what a field of another request does; empty: nothing."""
    own = successors.get(name) or FIELDS.get(name)
    return f"; {own}" if own else ""


@cache
def hints_of(kind: type[Fields]) -> dict[str, Any]:
    """The annotation of every field, whole, by its name on the wire."""
    hints = get_type_hints(kind, include_extras=True)
    return {name: hints[field.name] for name, field in _fields(kind).items()}


def defaults_of(kind: type[Fields]) -> dict[str, Any]:
    """The default of every field that has one, by its name on the wire."""
    return {
        name: field.default_factory() if field.default is NODEFAULT else field.default
        for name, field in _fields(kind).items()
        if not field.required
    }


@cache
def _fields(kind: type[Fields]) -> dict[str, msgspec.structs.FieldInfo]:
    """Return the fields by their names on the wire."""
    return {field.encode_name: field for field in msgspec.structs.fields(kind)}


def refused(kind: type[Fields], name: str, value: Any, why: str = "") -> InvalidRequest:
    """Return the error for a value that a field of a request may not have."""
    must = f"{name} must be {allowed(hints_of(kind)[name])}; got {show(value)}"
    return InvalidRequest(f"{must}: {why}" if why else must, name)


def _convert(kind: type[Fields], name: str, value: Raw) -> Any:
    hint = hints_of(kind)[name]
    if len(value) > (most := _most_bytes(hint)):
        raise InvalidRequest(
            f"{name} must be {allowed(hint)}, in at most {most} bytes; got {show(value)}", name
        )
    try:
        if first_byte(value) == b"{" and _is_struct(hint):
            value = _without_nulls(value)
        return decoded(value, hint)
    except msgspec.ValidationError as error:
        is_unknown = "unknown field" in str(error)
        why = cut(in_words(error, name), _SHOWN) if is_unknown else ""
        raise refused(kind, name, value, why) from None
    except UNDECODABLE as error:
        raise not_json(value, error) from None


def _without_nulls(value: Raw) -> Raw:
    """Return an object's JSON without its fields that are null, which are as if absent."""
    fields = fields_of(value)
    given = not_null(fields)
    return value if len(given) == len(fields) else to_json(given)


@cache
def _is_struct(hint: Any) -> bool:
    """Whether an object of this type is a struct: what others have at null is a value."""
    kind = _described(hint)
    return isinstance(getattr(kind, "type", kind), inspect.StructType)


@cache
def _most_bytes(hint: Any) -> int:
    """Return the most bytes of a field's JSON: those in its annotation, or MAX_VALUE_BYTES."""
    extra = getattr(_described(hint), "extra", None) or {}
    return int(extra.get("most_bytes", MAX_VALUE_BYTES))


def _described(hint: Any) -> Any:
    """Return what msgspec knows of a type; of an optional one, of what else it may be."""
    options = getattr(inspect.type_info(hint), "types", (inspect.type_info(hint),))
    return next(option for option in options if not isinstance(option, inspect.NoneType))


@cache
def allowed(hint: Any) -> str:
    """Return in words which values a field may have, for error messages and the OpenAPI document.

    That is the description in its annotation, or else its type and range.
    """
    kind = _described(hint)
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


def is_neutral(given: Raw, neutral: tuple[Any, ...]) -> bool:
    """Whether a value asks for nothing."""
    if len(given) > SMALL:  # none of them is large
        return False
    try:
        value = msgspec.json.decode(given)
    except UNDECODABLE:  # a number that is too large, or too many lists in lists
        return False
    return any(_is_as(value, other) for other in neutral)


def _is_as(value: Any, neutral: Any) -> bool:
    """Whether a value is a neutral one; of an object, whether all that it has is."""
    if isinstance(value, dict) and isinstance(neutral, dict):
        return all(
            name in neutral and (item is None or _is_as(item, neutral[name]))
            for name, item in value.items()
        )
    # True is not 1; lists are none of numbers.
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


def check_neutral(
    name: str, given: Raw, neutral: tuple[Any, ...], successors: Mapping[str, str]
) -> None:
    """Raise InvalidRequest for a value that asks for something, of a field that is not honoured."""
    if not is_neutral(given, neutral):
        leave = "; leave it out" + (f" or send {show(neutral[0])}" if neutral else "")
        way = _way(name, successors) or leave
        raise InvalidRequest(f"{name} = {show(given)} is not supported{way}", name)


def _from_text(text: str, hint: Any) -> Any:
    """Return the value, or None if invalid; so is the text `null`, which msgspec reads as None."""
    try:
        return msgspec.convert(text, hint, strict=False)
    except msgspec.ValidationError:
        return None


def show(value: Any) -> str:
    """A value, or a value's JSON, as JSON that is cut to what fits a message."""
    if isinstance(value, Raw):
        if len(value) > SMALL:
            return _show_large(value)
        try:
            value = msgspec.json.decode(value)
        except UNDECODABLE:  # a number that is too large, or too many lists in lists
            return cut(bytes(value).decode(errors="replace"), _SHOWN)
    if isinstance(value, list | dict) and len(value) > 16:
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    try:
        return cut(msgspec.json.encode(value).decode(), _SHOWN)
    except RecursionError:  # it could be read, a few calls further up
        return "a value in too many others"


def _show_large(value: Raw) -> str:
    what = {b"[": "a list of ", b"{": "an object of "}.get(first_byte(value), "")
    if not what:
        what = bytes(memoryview(value)[:_SHOWN]).decode(errors="ignore") + "… of "
    return f"{what}{len(value)} bytes"
