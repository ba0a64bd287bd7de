"""What a schema leaves open, bounded: no further properties are invented, and numbers end.

Schemas are those that `json_schema` has written; they are changed in place. `allOf`, and other
keywords beside `anyOf` or `$ref`, are first written as one schema where that is possible, since a
part of a joined schema does not know which properties the others name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from decimal import Decimal
from typing import Any

from srm.engine.constraints.pattern import is_endless
from srm.engine.constraints.schema_facts import TYPES, Schema
from srm.engine.constraints.trial import is_possible, matches

MOST_DIGITS = 15
"""Most digits of an integer, and of a number before its point, that has no bounds of its own."""
MOST_DECIMALS = 10
"""Most digits behind the point of a number without `multipleOf`."""
MOST_CHARACTERS = 128
"""Most characters of a string with a pattern that sets no end to it, beyond its `minLength`. It
has half of them where llguidance cannot follow the pattern so far, and no end where neither can."""
ANY_JSON = "#/$defs/any"
"""The reference to the schema of any JSON."""
LARGEST = 2**53
"""Numbers up to this are told apart by every reader of JSON; bounds beyond count as it."""
_COARSE = Decimal(10) ** (1 - MOST_DECIMALS)
"""Bounds that are no multiples of this may have no number between them of so few decimals."""
_ALL_TYPES = [name for name in TYPES if name != "integer"]
_ALONE = {"allOf", "anyOf", "$ref", "enum", "const"}
_MOST_MERGED = 2_000
"""Most schemas that are made by merging others: branches of branches multiply."""
_MOST_DEEP = 12
_HIGHEST = "minimum exclusiveMinimum minLength minItems minProperties".split()
_LOWEST = "maximum exclusiveMaximum maxLength maxItems maxProperties".split()
Definitions = dict[str, Schema]
Own = dict[str, Any]


class _Unmergeable(Exception):
    """Two schemas cannot be written as one."""


def bound_schema(root: Own, definitions: Definitions, strict: bool) -> list[Own]:
    """Merge, close and bound all schemas of a document, which `definitions` refer to by their
    `$ref`. Returns those that still join several.

    Objects that list properties have no others unless `additionalProperties` says so; with
    `strict`, neither have those that list none.
    """
    everything = {**definitions, "#": root}
    for schema in _all_of(everything.values()):
        for container, key in _places(schema):
            if container[key] is True:
                container[key] = {}
    merger = _Merger(everything)
    for schema in _all_of(everything.values()):
        if _is_join(schema):
            merger.merge(schema)
    schemas = _all_of(everything.values())
    joining = [own for own in schemas if _is_join(own)]
    parts = _reached(
        [*joining, *(own for schema in schemas for own in _overlapping(schema))], everything
    )
    any_json: Own = {"type": _ALL_TYPES}
    for schema in [*schemas, any_json]:
        if id(schema) not in parts:
            _bound(schema, strict and schema is not any_json)
        elif "type" in schema and not schema.keys() & _ALONE:  # other parts may name properties
            _bound_numbers(schema)
    if any(own.get("$ref") == ANY_JSON for own in _all_of([root, *definitions.values()])):
        definitions[ANY_JSON] = any_json
    return joining


def _all_of(schemas: Iterable[Schema]) -> list[Own]:
    """Return the schemas and all within them, each once."""
    waiting, seen = list(schemas), dict[int, Own]()
    for schema in waiting:  # which grows meanwhile
        if isinstance(schema, dict) and id(schema) not in seen:
            seen[id(schema)] = schema
            waiting.extend(container[key] for container, key in _places(schema))
    return list(seen.values())


def _places(schema: Own) -> Iterator[tuple[Any, Any]]:
    """Yield where the schemas within a schema are: containers, and their keys or indices."""
    for keyword in ("items", "additionalProperties"):
        if keyword in schema:
            yield schema, keyword
    for keyword in ("properties", "patternProperties"):
        yield from ((schema[keyword], name) for name in schema.get(keyword, ()))
    for keyword in ("anyOf", "allOf", "prefixItems"):
        yield from ((schema[keyword], place) for place in range(len(schema.get(keyword, ()))))


def _is_join(schema: Own) -> bool:
    return "allOf" in schema or (len(schema) > 1 and ("anyOf" in schema or "$ref" in schema))


def _overlapping(schema: Own) -> list[Schema]:
    """Return the schemas of patterns and of listed properties that they match: both hold."""
    named, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    names = {**named, **dict.fromkeys(schema.get("required", ()))}
    matched = {pattern: matches(pattern, names) for pattern in patterns if names}
    values = [patterns[pattern] for pattern, matching in matched.items() if matching]
    return values + [named[name] for own in matched.values() for name in own if name in named]


def _reached(schemas: Iterable[Schema], everything: Definitions) -> set[int]:
    """Return the ids of the schemas and of all that is within them and behind their references."""
    waiting, reached = list(schemas), set[int]()
    for schema in waiting:  # which grows meanwhile
        if isinstance(schema, dict) and id(schema) not in reached:
            reached.add(id(schema))
            waiting.extend(container[key] for container, key in _places(schema))
            waiting.append(everything.get(schema.get("$ref", ""), True))
    return reached


class _Merger:
    def __init__(self, everything: Definitions) -> None:
        self._everything = everything
        self._num_merged = 0

    def merge(self, schema: Own) -> None:
        """Write a schema that joins several as one, in place, if that is possible."""
        try:
            merged = self._flat(schema, _MOST_DEEP)
        except _Unmergeable:
            return
        schema.clear()
        schema.update(merged)

    def _flat(self, schema: Schema, deep: int) -> Own:
        """Return a new schema without joins, but for an `anyOf` that stands alone."""
        if schema is True:
            return {}
        self._num_merged += 1
        if not isinstance(schema, dict) or not deep or self._num_merged > _MOST_MERGED:
            raise _Unmergeable
        if not _is_join(schema):
            return dict(schema)
        flat = {name: value for name, value in schema.items() if name not in ("allOf", "$ref")}
        parts = [*schema.get("allOf", ()), *([schema] if "$ref" in schema else [])]
        for part in parts:
            own: Own = {"$ref": part["$ref"]} if part is schema else self._flat(part, deep - 1)
            for _ in range(deep):
                if "$ref" in own:
                    own = self._flat(self._everything[own["$ref"]], deep - 1)
            flat = self._both(flat, own, deep - 1)
        if len(flat) == 1 or "anyOf" not in flat:
            return flat
        branches = flat.pop("anyOf")
        return {"anyOf": [self._flat({"allOf": [flat, own]}, deep - 1) for own in branches]}

    def _both(self, a: Own, b: Own, deep: int) -> Own:
        """Return what both say, whose keywords are in the order of the first."""
        for x, y in ((a, b), (b, a)):
            named = y.get("properties", {}).keys() | set(y.get("required", ()))
            if "patternProperties" in x and (named or "additionalProperties" in y):
                raise _Unmergeable
            if "additionalProperties" in x and named - x.get("properties", {}).keys():
                raise _Unmergeable
        merged = {**a, **b}
        for keyword in a.keys() & b.keys():
            merged[keyword] = _both_values(keyword, a[keyword], b[keyword])
        if "properties" in a and "properties" in b:
            named = merged["properties"] = {**a["properties"], **b["properties"]}
            for name in a["properties"].keys() & b["properties"].keys():
                both = [a["properties"][name], b["properties"][name]]
                named[name] = both[0] if both[0] == both[1] else self._flat({"allOf": both}, deep)
        return merged


def _both_values(keyword: str, x: Any, y: Any) -> Any:
    if keyword == "properties" or (x == y and type(x) is type(y)):
        return x
    if keyword in _HIGHEST:
        return max(x, y)
    if keyword in _LOWEST:
        return min(x, y)
    if keyword == "required":
        return list(dict.fromkeys([*x, *y]))
    if keyword == "type":
        ours, theirs = ([own] if isinstance(own, str) else own for own in (x, y))
        types = [own for own in TYPES if _has(ours, own) and _has(theirs, own)]
        if "number" in types and "integer" in types:
            types.remove("integer")
        if types:
            return types[0] if len(types) == 1 else types
    raise _Unmergeable


def _has(types: list[str], name: str) -> bool:
    return name in types or (name == "integer" and "number" in types)


def _bound(schema: Own, strict: bool) -> None:
    """Close and bound a schema that is no part of another."""
    if not schema:
        schema["$ref"] = ANY_JSON
    if not schema.keys() & _ALONE:
        is_object = "properties" in schema or "object" in schema.get("type", ())
        types = schema.setdefault("type", _ALL_TYPES)
        if "array" in types:
            schema.setdefault("items", {"$ref": ANY_JSON})
        if "object" in types:
            _close(schema, strict and is_object)
        if "pattern" in schema and not schema.keys() & {"maxLength", "format"}:
            _bound_length(schema)
        _bound_numbers(schema)


def _close(schema: Own, strict: bool) -> None:
    if "additionalProperties" in schema:
        return
    named, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    unlisted = [name for name in schema.get("required", ()) if name not in named]
    matched = {name for pattern in patterns for name in matches(pattern, unlisted)}
    if further := {name: {"$ref": ANY_JSON} for name in unlisted if name not in matched}:
        named = schema["properties"] = {**named, **further}
    lists_names = "properties" in schema or patterns
    is_closed = strict or (lists_names and not schema.get("minProperties"))
    schema["additionalProperties"] = False if is_closed else {"$ref": ANY_JSON}


def _bound_length(schema: Own) -> None:
    pattern, least = schema["pattern"], schema.get("minLength", 0)
    if not is_endless(pattern):
        return
    for most in (least + MOST_CHARACTERS, least + MOST_CHARACTERS // 2):
        own = {"type": "string", "pattern": pattern, "minLength": least, "maxLength": most}
        if is_possible(own):
            schema["maxLength"] = most
            return


def _bound_numbers(schema: Own) -> None:
    may_have_decimals = "number" in schema["type"]
    if not may_have_decimals and "integer" not in schema["type"]:
        return
    lower, upper = _HIGHEST[:2], _LOWEST[:2]
    bounds = [schema[keyword] for keyword in (*lower, *upper) if keyword in schema]
    reach = max(map(abs, bounds), default=0) + schema.get("multipleOf", 0)
    is_far = reach >= 10**MOST_DIGITS - 1
    own = {name: schema[name] for name in (*lower, *upper, "multipleOf") if name in schema}
    own["type"] = "number" if may_have_decimals else "integer"
    ends = {
        keywords[not is_far]: sign * (LARGEST if is_far else 10**MOST_DIGITS)
        for keywords, sign in ((lower, -1), (upper, 1))
        if not own.keys() & set(keywords)
    }
    if reach <= LARGEST or is_possible(own | ends):
        schema.update(ends)
        own.update(ends)
    if may_have_decimals and "multipleOf" not in schema:
        if all(Decimal(repr(bound)) % _COARSE == 0 for bound in bounds):
            schema["multipleOf"] = 10**-MOST_DECIMALS
        else:
            _bound_decimals(schema, own)


def _bound_decimals(schema: Own, own: Own) -> None:
    """Allow numbers of MOST_DECIMALS, the bounds, and tenths of the way between close ones.

    llguidance reads no `multipleOf` of more decimals, and a number without it has no end. `own` are
    the keywords of the schema's numbers.
    """
    step = {"multipleOf": 10**-MOST_DECIMALS}
    low, high = (
        Decimal(repr(choose(own[name] for name in names if name in own)))
        for choose, names in ((max, _HIGHEST[:2]), (min, _LOWEST[:2]))
    )
    has_step = is_possible(own | step)
    if not has_step and high - low > _COARSE:  # what llguidance cannot read at all
        return
    tenths = (0, 10) if has_step else range(11)
    places = dict.fromkeys(float(low + (high - low) * tenth / 10) for tenth in tenths)
    points = [{"minimum": place, "maximum": place} for place in places]
    branches: list[Own] = [{"type": "number"} | at for at in points if is_possible(own | at)]
    if has_step:
        branches.insert(0, schema | step)
    elif others := [name for name in schema["type"] if name in TYPES and name != "number"]:
        branches.insert(0, schema | {"type": others})
    if branches:
        schema.clear()
        schema["anyOf"] = branches
