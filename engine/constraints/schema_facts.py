"""What can be said of schemas without compiling them: which exclude each other, which can be met.

Schemas are those that `json_schema` has written. What cannot be proved counts as not so.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

Schema = dict[str, Any] | bool
Definitions = Mapping[str, Schema]
"""Schemas by the `$ref` that leads to them."""

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
_SOME = 40
"""Bytes that a text of some pattern or format is taken to have: as an UUID."""
_ENDLESS = 10**6
"""A length: no text is so short."""
_MOST = 12
"""Most references and branches in each other that are followed."""


def exclude_each_other(
    branches: list[Schema], beside: Schema, definitions: Definitions
) -> tuple[int, int] | None:
    """Return two branches that a value which `beside` allows might both meet; None: no two."""
    for (first, a), (second, b) in combinations(enumerate(branches), 2):
        if not _excludes(a, b, types_of(beside, definitions), definitions, _MOST):
            return first, second
    return None


def types_of(schema: Schema, definitions: Definitions, most: int = _MOST) -> set[str]:
    """Types that a value may have at most; "number" is one that is no integer."""
    if isinstance(schema, bool):
        return set(TYPES) if schema else set()
    types = set(TYPES)
    for part in _parts(schema, definitions, most):
        if "type" in part:
            own = [part["type"]] if isinstance(part["type"], str) else part["type"]
            types &= {*own, "integer"} if "number" in own else set(own)
        if (values := _values(part)) is not None:
            types &= set(map(_type_of, values))
        if "anyOf" in part and most:
            types &= set[str]().union(
                *(types_of(branch, definitions, most - 1) for branch in part["anyOf"])
            )
    return types


def _type_of(value: Any) -> str:
    if isinstance(value, float):
        return "integer" if value.is_integer() else "number"
    kinds = {bool: "boolean", int: "integer", str: "string", list: "array", dict: "object"}
    return kinds.get(type(value), "null")


def _parts(schema: Schema, definitions: Definitions, most: int) -> Iterator[dict[str, Any]]:
    """Yield the objects all of which a value has to meet."""
    if isinstance(schema, bool):
        if not schema:
            yield {"enum": []}
        return
    yield schema
    if most:
        for item in schema.get("allOf", []):
            yield from _parts(item, definitions, most - 1)
        if "$ref" in schema and (target := definitions.get(schema["$ref"])) is not None:
            yield from _parts(target, definitions, most - 1)


def _values(part: dict[str, Any]) -> list[Any] | None:
    return [part["const"]] if "const" in part else part.get("enum")


def _excludes(a: Schema, b: Schema, types: set[str], definitions: Definitions, most: int) -> bool:
    """Whether no value of these types meets both."""
    common = types & types_of(a, definitions) & types_of(b, definitions)
    if not common:
        return True
    if not most:
        return False
    ours, theirs = (list(_parts(schema, definitions, _MOST)) for schema in (a, b))
    for parts, other in ((ours, theirs), (theirs, ours)):
        for part in parts:
            if "anyOf" in part and all(
                _excludes(branch, {"allOf": other}, common, definitions, most - 1)
                for branch in part["anyOf"]
            ):
                return True
    if any(_have_no_value_in_common(x, y) for x in ours for y in theirs):
        return True
    if common != {"object"}:
        return False
    names = {name for part in (*ours, *theirs) for name in part.get("required", [])}
    return any(
        _excludes(_of_name(x, name), _of_name(y, name), set(TYPES), definitions, most - 1)
        for name in names
        for x in ours
        for y in theirs
    )


def _have_no_value_in_common(a: dict[str, Any], b: dict[str, Any]) -> bool:
    ours, theirs = _values(a), _values(b)
    if ours is None or theirs is None:
        return False
    return {_spelling(value) for value in ours}.isdisjoint(map(_spelling, theirs))


def _spelling(value: Any) -> str:
    """Return a text that equal values alone share."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, dict):
        return json.dumps([[name, _spelling(value[name])] for name in sorted(value)])
    return json.dumps([_spelling(item) for item in value] if isinstance(value, list) else value)


def _of_name(part: dict[str, Any], name: str) -> Schema:
    """Return what the part says at least of the property of that name."""
    properties: dict[str, Schema] = part.get("properties", {})
    if name in properties:
        return properties[name]
    return "patternProperties" in part or part.get("additionalProperties", True) is not False


def endless(definitions: Definitions) -> set[str]:
    """Return the references whose schemas no finite value meets, since they need themselves."""
    ending: set[str] = set()
    while more := {
        reference
        for reference, schema in definitions.items()
        if reference not in ending and _ends(schema, ending)
    }:
        ending |= more
    return definitions.keys() - ending


def _ends(schema: Schema, ending: set[str]) -> bool:
    """Whether a finite value meets the schema, if these references have one."""
    if isinstance(schema, bool):
        return schema
    needed: list[Schema] = list(schema.get("allOf", []))
    if "$ref" in schema and schema["$ref"] not in ending:
        return False
    if "anyOf" in schema and not any(_ends(branch, ending) for branch in schema["anyOf"]):
        return False
    if schema.get("type") == "object":
        needed += [_of_name(schema, name) for name in schema.get("required", [])]
    if schema.get("type") == "array" and (least := schema.get("minItems", 0)):
        prefix = schema.get("prefixItems", [])
        needed += [*prefix[:least], *([schema.get("items", True)] if least > len(prefix) else [])]
    return all(_ends(item, ending) for item in needed)


def longest_start(root: dict[str, Any]) -> int:
    """Return about the most bytes that the shortest text of a schema within another has, with its
    name: what a text must have more, at most, once one of them is begun."""
    definitions: dict[str, Schema] = {
        f"#/$defs/{name}": schema for name, schema in root.get("$defs", {}).items()
    }
    lengths, is_new = dict.fromkeys(definitions, _ENDLESS), True
    starts: list[int] = []
    while is_new:
        starts = []
        after = {name: _shortest(own, lengths, starts) for name, own in definitions.items()}
        is_new, lengths = after != lengths, after
    starts.append(_shortest(root, lengths, starts))
    return max((start for start in starts if start < _ENDLESS), default=0)


def _shortest(schema: Schema, lengths: Mapping[str, int], starts: list[int]) -> int:
    """Return about the fewest bytes of a value, and add those of all within it to `starts`. Of
    alternatives it is one without brackets, and of these the longest."""
    if isinstance(schema, bool):
        return 2 if schema else _ENDLESS

    def start(own: Schema, name: str = "") -> int:
        starts.append(min(_ENDLESS, _shortest(own, lengths, starts) + len(name.encode()) + 4))
        return starts[-1]

    parts = [start(own) for own in schema.get("allOf", ())]
    if "$ref" in schema:
        parts.append(lengths.get(schema["$ref"], _ENDLESS))
    if "anyOf" in schema:
        branches = [(start(own), own) for own in schema["anyOf"]]
        simple = [length for length, own in branches if _is_simple(own)]
        parts.append(max(simple) if simple else min(length for length, _ in branches))
    if (values := _values(schema)) is not None:
        parts.append(max((len(json.dumps(value)) for value in values), default=_ENDLESS))
    named = {name: start(own, name) for name, own in schema.get("properties", {}).items()}
    for own in schema.get("patternProperties", {}).values():
        start(own, " " * _SOME)
    start(schema.get("additionalProperties", True))
    first = [start(own) for own in schema.get("prefixItems", ())]
    least, item = schema.get("minItems", 0), start(schema.get("items", True))
    has_form = "pattern" in schema or "format" in schema
    of_types = {
        "object": 2 + sum(named.get(own, len(own) + 8) for own in schema.get("required", ())),
        "array": 2 + sum([*first, *[item] * max(0, least - len(first))][:least]),
        "string": 2 + schema.get("minLength", 0) + has_form * _SOME,
    }
    types = schema.get("type", [])
    names = [types] if isinstance(types, str) else types
    lengths_of = [of_types.get(name, _SOME // 2) for name in names]
    if names:
        is_nested = names in (["object"], ["array"])
        parts.append(lengths_of[0] if is_nested else max(lengths_of))
    return min(_ENDLESS, sum(parts))


def _is_simple(schema: Schema) -> bool:
    """Whether a value that the schema allows may have no brackets, as far as it says itself."""
    return isinstance(schema, dict) and (
        "const" in schema
        or "enum" in schema
        or not {"object", "array"}.issuperset(
            [types] if isinstance(types := schema.get("type", ["object"]), str) else types
        )
    )
