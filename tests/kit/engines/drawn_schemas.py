"""Random schemas: as programs send them, and odd ones, whose keywords meet where few do."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

from jsonschema_rs import validator_for

Json = dict[str, Any]
Draw = Callable[[Random, int, bool], Json]
FORMATS = {"date": "2000-01-01", "uuid": "0" * 8 + "-0000" * 3 + "-" + "0" * 12}
FORMATS |= {"ipv4": "0.0.0.0", "email": "a@b.c"}
"""Formats and patterns, each with a short text that it allows."""
PATTERNS = {"^[A-Z]{2}[0-9]{3}$": "AA000", "^(a|b)+$": "a", "^[0-9]{4}-[0-9]{2}$": "0000-00"}
PATTERNS |= {"^\\d+-\\d+$": "0-0", "^[a-z]+@[a-z]+\\.com$": "a@a.com", "^\\S+ \\S+$": "a a"}
PATTERNS |= {"^a+b$": "ab", "^[a-z]+x[a-z]+y$": "axay", "^(ab)+c$": "abc", "a.*b.*c": "abc"}
PATTERNS |= {r"^.*\.json$": ".json", "^[a-z]+end$": "aend", "foo.*bar": "foobar"}
ODD_PATTERNS = {"^a": "a", "b$": "b", "a": "a", "^ab?$": "a", "^.{5}$": "a" * 5, "^a{5}$": "a" * 5}
ODD_PATTERNS |= {"^[ab]+$": "a", "^$": "", "x|^a": "a", "^[\x01]$": ""}
ODD_NAMES = ["a", "b", "ab", "aa", "x", ""]


def draw_schema(rng: Random, depth: int = 0, is_odd: bool = False) -> Json:
    """Draw a schema; the outermost one is of an object unless it `is_odd`.

    One in ten objects may have further properties, so that not every schema is regular. Many odd
    ones allow nothing, or less than they seem to.
    """
    kinds: list[Draw] = [_object, _array, _nullable, _tagged]
    if is_odd:
        kinds += [_overlapping, _overlapping, _tuple, _joined]
    is_leaf = depth and (depth >= 3 or rng.random() < 0.6)
    if is_leaf:
        return _odd_leaf(rng) if is_odd and rng.random() < 0.7 else _leaf(rng)
    return (rng.choice(kinds) if depth or is_odd else _object)(rng, depth, is_odd)


def short_value(schema: Json | bool) -> Any:
    """Return a value that such a schema most likely allows, and whose JSON is about the shortest;
    `...` where none is known."""
    if isinstance(schema, bool):
        return 0 if schema else ...
    if "const" in schema:
        return schema["const"]
    if branches := schema.get("anyOf") or schema.get("oneOf"):
        return min(map(short_value, branches), key=_length)
    if "enum" in schema:
        return min(schema["enum"], key=_length)
    match schema.get("type", "integer"):
        case "object":
            given = schema.get("properties", {})
            rest = schema.get("additionalProperties", True)
            value = {
                name: short_value(given.get(name, rest)) for name in schema.get("required", ())
            }
            return ... if ... in value.values() else value
        case "array":
            items = [*schema.get("prefixItems", ()), *[schema.get("items", True)] * 4]
            values = [short_value(item) for item in items[: schema.get("minItems", 0)]]
            return ... if ... in values else values
        case "string":
            texts = PATTERNS | ODD_PATTERNS | FORMATS
            form = str(schema.get("pattern", schema.get("format")))
            return texts.get(form, "a" * schema.get("minLength", 0))
        case "integer" | "number":
            is_valid = validator_for(schema).is_valid
            return min(filter(is_valid, range(-60, 300)), key=_length, default=...)
        case kind:
            return True if kind == "boolean" else None


def _length(value: Any) -> int:
    return 10**6 if value is ... else len(json.dumps(value))


def _object(rng: Random, depth: int, is_odd: bool) -> Json:
    names = rng.sample(["id", "name", "kind", "size", "tags", "unit", "price", "note"], 4)
    names = names[: rng.randint(1, 4)]
    schema: Json = {
        "type": "object",
        "properties": {name: draw_schema(rng, depth + 1, is_odd) for name in names},
        "required": [name for name in names if rng.random() < 0.8],
    }
    return schema if rng.random() < 0.1 else schema | {"additionalProperties": False}


def _array(rng: Random, depth: int, is_odd: bool) -> Json:
    least = rng.randint(0, 2)
    items = draw_schema(rng, depth + 1, is_odd)
    return {"type": "array", "items": items, "minItems": least, "maxItems": least + 3}


def _nullable(rng: Random, depth: int, is_odd: bool) -> Json:
    return {"anyOf": [draw_schema(rng, depth + 1, is_odd), {"type": "null"}]}


def _tagged(rng: Random, depth: int, is_odd: bool) -> Json:
    """A tagged union, as pydantic writes it."""
    return {
        "oneOf": [
            {
                "type": "object",
                "properties": {
                    "tag": {"const": tag},
                    "value": draw_schema(rng, depth + 1, is_odd),
                },
                "required": ["tag", "value"],
                "additionalProperties": False,
            }
            for tag in ("first", "second")
        ]
    }


def _overlapping(rng: Random, depth: int, is_odd: bool) -> Json:
    """An object whose patterns, names and sizes overlap."""

    def draw(keys: list[str]) -> Json:
        return {key: draw_schema(rng, depth + 1, is_odd) for key in keys}

    keywords: Json = {
        "properties": draw(rng.sample(ODD_NAMES, rng.randint(1, 3))),
        "patternProperties": draw(rng.sample([*ODD_PATTERNS], rng.randint(1, 2))),
        "additionalProperties": rng.choice([False, False, True, draw_schema(rng, 3, is_odd)]),
        "required": rng.sample(ODD_NAMES, rng.randint(0, 2)),
        "minProperties": rng.randint(0, 1),
        "maxProperties": rng.randint(0, 3),
    }
    chances = (0.8, 0.6, 0.7, 0.6, 0.1, 0.1)
    given = [name for name, chance in zip(keywords, chances, strict=True) if rng.random() < chance]
    return {"type": "object"} | {name: keywords[name] for name in given}


def _tuple(rng: Random, depth: int, is_odd: bool) -> Json:
    first = [draw_schema(rng, depth + 1, is_odd) for _ in range(rng.randint(1, 2))]
    sizes = {"minItems": rng.randint(0, 3), "maxItems": rng.randint(1, 4)}
    return _array(rng, depth, is_odd) | {"prefixItems": first} | sizes


def _joined(rng: Random, depth: int, is_odd: bool) -> Json:
    parts = [_overlapping(rng, depth + 1, is_odd) for _ in range(2)]
    joined = {rng.choice(["anyOf", "allOf"]): parts}
    return joined if rng.random() < 0.5 else _object(rng, depth, is_odd) | joined


def _leaf(rng: Random) -> Json:
    low = rng.randint(-50, 50)
    number = {"minimum": low, "maximum": low + rng.randint(0, 200)}
    return rng.choice(
        [
            {"type": "boolean"},
            {"type": "integer"} | number,
            {"type": "integer", "multipleOf": 7, "minimum": abs(low)},
            {"type": "number"} | number,
            {"enum": rng.sample(["red", "green", "blue", 1, 2, None], 3)},
            {"const": "v1"},
            {"type": "string", "minLength": 1, "maxLength": rng.randint(1, 16)},
            {"type": "string", "pattern": rng.choice([*PATTERNS]), "maxLength": 20},
            {"type": "string", "pattern": rng.choice([*PATTERNS])},
            {"type": "string", "format": rng.choice([*FORMATS])},
        ]
    )


def _odd_leaf(rng: Random) -> Json:
    sizes = {"minLength": rng.randint(0, 4), "maxLength": rng.randint(0, 6)}
    bounds = {"exclusiveMinimum": rng.randint(-3, 3), "maximum": rng.randint(-3, 6)}
    return rng.choice(
        [
            {},
            {"type": "object"},
            {"type": rng.choice(["number", "integer", "string", "array"])},
            {"type": "string", "pattern": rng.choice([*ODD_PATTERNS])},
            {"type": "string", "pattern": rng.choice([*ODD_PATTERNS])} | sizes,
            {"type": "string", "format": rng.choice([*FORMATS])} | sizes,
            {"type": "integer"} | bounds,
            {"type": "number", "multipleOf": rng.choice([0.5, 1, 3])} | bounds,
            {"enum": [rng.choice([1, "a", None])], "type": rng.choice(["string", "null"])},
            {"const": {"a": rng.choice([1, "b"])}},
        ]
    )
