"""JSON taken apart level by level, so that what can be made is bounded before any of it is made.

A body is limited in bytes, and three bytes of JSON make an object of 60: a list in a list. So an
object is cut into its fields' bytes first, and each of them is decoded by what it may be, which
fails at the first thing that it may not be. No call here holds the interpreter for long: what is
long is decoded piece by piece, so that a thread beside the event loop does not stop it.
"""

from __future__ import annotations

import re
from array import array
from functools import cache
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from srm.errors import UNDECODABLE

MAX_FIELDS = 1024
"""Most fields of an object whose fields are looked up by name."""
MAX_VALUE_BYTES = 1024 * 1024
"""Most bytes of JSON that are decoded as whatever they are. They make at most some 25 MB."""
SMALL = 64 * 1024
"""Bytes of JSON that anything may be made of: it takes a millisecond, and 2 MB."""

TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
TokenIds = Annotated[list[TokenId], Meta(min_length=1)]
ID_FORMS = (
    Annotated[list[TokenId], Meta(min_length=1, description="a list of token ids, not empty")],
)
"""Types on the wire of a field that is token ids."""
AnyJson = Annotated[Raw, Meta(extra_json_schema={})] | UnsetType
"""A field that is passed over, whatever it is."""
_Json = bytes | Raw
_PIECE = 256 * 1024
_INDENT = 1024
"""More bytes than anybody indents an item by."""
_HAS_POINT = re.compile(rb"[0-9][.eE]")
"""Finds a number that may be a whole one and not written as such."""
_HAS_TEXT = re.compile(rb'(?:[^"]++|""|"(?:[^"\\]++|\\.)*+"\s*+:)*+"', re.DOTALL)
"""Matches up to a string that is neither empty nor the name of a field."""
_decode_fields = msgspec.json.Decoder(dict[str, Raw]).decode
_decode_items = msgspec.json.Decoder(list[Raw]).decode
_decode_texts = msgspec.json.Decoder(list[str]).decode


def to_json(value: Any) -> Raw:
    """Return the JSON of a value, which stands for it until it is decoded."""
    return Raw(msgspec.json.encode(value))


def first_byte(data: _Json) -> bytes:
    """Return the first byte of a value, which says what it is. Copies nothing."""
    return bytes(memoryview(data)[:1])


def first_item_byte(data: _Json) -> bytes:
    """Return the first byte of the first item of a list, or the list's end."""
    return bytes(memoryview(data)[1:_INDENT]).lstrip()[:1]


def fields_of(data: _Json) -> dict[str, Raw]:
    """Return the fields of an object, each as its JSON.

    Raises msgspec.ValidationError if it is none, TooManyFields, and UNDECODABLE.
    """
    fields = _decode_fields(data) if len(data) <= SMALL else _fields_of_large(data)
    if len(fields) > MAX_FIELDS:
        raise TooManyFields(f"Expected at most {MAX_FIELDS} fields")
    return fields


class TooManyFields(msgspec.ValidationError):
    """An object has more than MAX_FIELDS."""


class _Name(str):
    """The name of a field."""


def _fields_of_large(data: _Json) -> dict[str, Raw]:
    count = 0

    def counted(_kind: type, name: str) -> _Name:
        nonlocal count
        count += 1
        if count > MAX_FIELDS:
            raise TooManyFields(f"Expected at most {MAX_FIELDS} fields")
        return _Name(name)

    fields = msgspec.json.decode(data, type=dict[_Name, Raw], dec_hook=counted)
    return {str(name): value for name, value in fields.items()}


def items_of(data: _Json, most: int) -> list[Raw] | None:
    """Return the items of a list, each as its JSON; None if there are more than `most`.

    Raises msgspec.ValidationError if it is no list, and UNDECODABLE.
    """
    if len(data) <= SMALL:
        items = _decode_items(data)
        return items if len(items) <= most else None
    try:
        fields = _decoder_of(most)(data)
    except msgspec.ValidationError:
        if first_byte(data) == b"[":
            return None
        raise
    return [raw for raw in msgspec.structs.astuple(fields) if raw is not UNSET]


@cache
def _decoder_of(most: int) -> Any:
    """Return the decoder of a list of at most so many items: msgspec counts those of a list only
    when it has made them all, and knows before how many fields a struct has."""
    fields = [(f"i{i}", Raw | UnsetType, UNSET) for i in range(most)]
    items = msgspec.defstruct("Items", fields, array_like=True, forbid_unknown_fields=True)
    return msgspec.json.Decoder(items).decode


def decoded(data: _Json, hint: Any) -> Any:
    """A value from its JSON as annotated; 16.0 is an integer too.

    Raises msgspec.ValidationError, and UNDECODABLE if it is no JSON.
    """
    try:
        return _decoder(hint).decode(data)
    except msgspec.ValidationError:
        if _HAS_POINT.search(data) is None:
            raise
        value = msgspec.json.decode(data)
        return msgspec.convert(_integral(value), hint, str_keys=True)


@cache
def _decoder(hint: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(hint)


def _integral(value: Any, depth: int = 2) -> Any:
    """Replace floats that are whole numbers by integers, in lists of lists too."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list) and depth:
        return [_integral(child, depth - 1) for child in value]
    return value


def token_ids(data: _Json) -> bytes:
    """Return a list's token ids as int32 little-endian.

    Raises msgspec.ValidationError for anything else, and UNDECODABLE.
    """
    if len(data) <= _PIECE:
        return _as_int32(decoded(data, list[TokenId]))
    return _long_ids(bytes(data))


def _long_ids(whole: bytes) -> bytes:
    if first_byte(whole) != b"[":
        raise msgspec.ValidationError("Expected a list of token ids")
    ids, begin = array("i"), 1
    while (end := whole.find(b",", begin + _PIECE)) >= 0:
        ids.frombytes(_as_int32(_decoded_piece(b"[%b]" % whole[begin:end], TokenIds)))
        begin = end + 1
    ids.frombytes(_as_int32(_decoded_piece(b"[%b" % whole[begin:], TokenIds)))
    return ids.tobytes()


def token_lists(data: _Json, most: int) -> list[bytes]:
    """Return the lists of token ids in a list, none of them empty, each as `token_ids` does.

    Raises msgspec.ValidationError for anything else and for more than `most`, and UNDECODABLE.
    """
    whole = bytes(data)
    if whole.count(b"[") - 1 > most:
        raise msgspec.ValidationError(f"Expected at most {most} lists")
    if len(whole) <= _PIECE:
        return list(map(_as_int32, decoded(whole, list[TokenIds])))
    results: list[bytes] = []
    begin, last = 1, len(whole) - 1
    while begin > 0:
        end = whole.find(b"]", begin, last)
        if end < 0:
            raise msgspec.ValidationError("Expected a list of lists of token ids")
        if end - begin > _PIECE:
            results.append(_long_ids(whole[begin : end + 1].lstrip()))
        else:  # as many as are whole in a piece
            end = max(end, whole.rfind(b"]", begin, min(begin + _PIECE, last)))
            lists = _decoded_piece(b"[%b]" % whole[begin : end + 1], list[TokenIds])
            results += map(_as_int32, lists)
        begin = whole.find(b",", end) + 1  # behind a list, so between two
    return results


def _decoded_piece(data: bytes, hint: Any) -> Any:
    """As `decoded`; what is cut in two by a piece's end was no number. Raises ValidationError."""
    try:
        return decoded(data, hint)
    except UNDECODABLE as error:
        what, _, _ = str(error).partition(" - at ")  # counted from the piece's beginning
        raise msgspec.ValidationError(what) from None


def _as_int32(ids: list[int]) -> bytes:
    return array("i", ids).tobytes()


def count_items(data: _Json) -> int:
    """Return about how many strings or lists are in a list; 1 for anything else."""
    if first_byte(data) != b"[" or (first := first_item_byte(data)) not in (b'"', b"["):
        return 1
    whole = bytes(data)
    return whole.count(b"[") - 1 if first == b"[" else (_quotes(whole) + 1) // 2


def _quotes(data: bytes) -> int:
    """Count what may begin or end strings: 2 for each, or 1 for one that ends with a backslash."""
    return data.count(b'"') - data.count(b'\\"')


def texts(data: _Json, most: int) -> list[str]:
    """Return the strings in a list.

    Raises msgspec.ValidationError for anything else and for more than `most`, which may be found
    before any is made, and UNDECODABLE.
    """
    if len(data) > SMALL and _quotes(bytes(data)) > 2 * most:
        raise msgspec.ValidationError(f"Expected at most {most} strings")
    return _decode_texts(data)


def prompts_of(data: _Json, most: int) -> list[str] | list[bytes]:
    """Return the prompts of a text, of token ids, or of a list of either, none of them empty; token
    ids as `token_ids` does.

    Raises msgspec.ValidationError for anything else and for more than `most`, and UNDECODABLE.
    """
    first = first_byte(data)
    items = first_item_byte(data) if first == b"[" else b""
    if first == b'"':
        return [msgspec.json.decode(data, type=str)]
    if items == b'"':
        return texts(data, most)
    if items == b"[":
        return token_lists(data, most)
    if ids := token_ids(data):
        return [ids]
    raise msgspec.ValidationError("Expected `array` of length >= 1")


def has_text(data: _Json) -> bool:
    """Whether a value has a string that is not empty, however deep."""
    return b'"' in (whole := bytes(data)) and _HAS_TEXT.match(whole) is not None
