"""Schemas: what is refused, by which place, and what the grammars of the others allow."""

from __future__ import annotations

import json
from datetime import date, datetime, time
from random import Random
from typing import Any

import pytest
from jsonschema import Draft202012Validator, FormatChecker

from srm.engine.constraints.constraint import json_constraint
from srm.engine.constraints.pattern import FORMATS
from srm.engine.constraints.trial import why_not
from srm.errors import InvalidRequest
from tests.kit.engines.matching import accepts, byte_tokenizer, draw_text

OPEN: dict[str, Any] = {"type": "object"}
BASE = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
MORE = {"properties": {"b": {"type": "boolean"}}}
TAGGED = {
    "oneOf": [
        {
            "type": "object",
            "properties": {"kind": {"const": kind}, "n": {"type": "integer"}},
            "required": ["kind", "n"],
        }
        for kind in ("cat", "dog")
    ]
}
"""As pydantic writes a tagged union."""

REFUSED: list[tuple[Any, str]] = [
    (3, "the schema: must be an object, true or false; got 3"),
    (False, "the schema: no JSON text that ends can meet it"),
    ({"minimun": 3}, "/minimun: this keyword is not supported; did you mean 'minimum'?"),
    ({"properties": {"a": {"not": {}}}}, "/properties/a/not: this keyword is not supported"),
    ({"items": [{"if": True}]}, "/items/0/if: this keyword is not supported; write anyOf"),
    ({"x-guidance": {}}, "/x-guidance: this keyword"),
    ({"uniqueItems": True}, "/uniqueItems: this keyword is not supported; leave it out and check"),
    ({"ownNote": 1}, "/ownNote: this keyword is not supported; leave it out, or begin its name"),
    ({"nullable": True}, '/nullable: this keyword is not supported; write "type" as a list'),
    ({"properties": {"a/b~": {"contains": {}}}}, "/properties/a~1b~0/contains: this keyword"),
    (
        {"contentMediaType": "application/json"},
        "/contentMediaType: this keyword is not supported; write pattern",
    ),
    ({"enum": []}, "/enum: must be a list of at least one value; got []"),
    ({"enum": list(range(10_001))}, "/enum: enums have more than 10000 values"),
    ({"const": 2**53 + 1}, "/const: numbers must be from -2**53 to 2**53"),
    ({"const": float("inf")}, "/const: numbers must be"),
    ({"const": ["\ud800"]}, "/const: it has half of a surrogate pair"),
    ({"const": "a\0"}, r"/const: it has the control character '\x00'"),
    ({"type": "text"}, "/type: must be of null, boolean, integer, number, string, array, object"),
    ({"type": []}, "/type: must be of"),
    ({"minimum": 2**60}, "/minimum: must be from -2**53 to 2**53"),
    ({"exclusiveMinimum": 2**53}, "/exclusiveMinimum: must be between -2**53 and 2**53"),
    ({"exclusiveMaximum": -(2**53)}, "/exclusiveMaximum: must be between -2**53 and 2**53"),
    ({"minimum": 2**53, "exclusiveMinimum": True}, "/minimum: must be between -2**53 and 2**53"),
    ({"minimum": True}, "/minimum: must be a number; got True"),
    ({"minLength": -1}, "/minLength: must be an integer from 0"),
    ({"maxItems": 1.5}, "/maxItems: must be an integer from 0"),
    ({"multipleOf": 0}, "/multipleOf: must be a number above 0"),
    ({"format": "idn-email"}, "/format: must be of date-time, date, time"),
    ({"format": "int32"}, "/format: int32 is one of numbers"),
    ({"type": ["integer", "string"], "format": "int64"}, "/format: int64 is one of numbers"),
    ({"pattern": 3}, "/pattern: must be a string; got 3"),
    ({"pattern": "[a[b]c]"}, "/pattern: '[a[b]'"),
    *(({"pattern": rf"[{set_}a]"}, "/pattern: '[") for set_ in (r"^\\&&", r"^\\--", r"\\~~")),
    ({"pattern": "a{,3}"}, "/pattern: {, is not supported in a pattern"),
    ({"pattern": r"\\{,3}"}, "/pattern: {, is not supported in a pattern"),
    ({"pattern": "[{,]{,3}"}, "/pattern: {, is not supported in a pattern"),
    ({"pattern": r"[\Z]"}, r"/pattern: \Z is not supported in a pattern"),
    ({"pattern": "(?i)a"}, "/pattern: (? is not supported in a pattern"),
    ({"pattern": "(?P<x>a)"}, "/pattern: (? is not supported in a pattern"),
    ({"patternProperties": {".": {}, r"[^\n\r\u2028\u2029]": {}}}, "/patternProperties: two"),
    ({"required": "a"}, "/required: must be a list of strings"),
    ({"properties": []}, "/properties: must be an object; got []"),
    ({"anyOf": []}, "/anyOf: must be a list of at least one schema"),
    ({"minProperties": 2}, "/minProperties: more than 1 must be in required"),
    ({"items": {}, "additionalItems": {}}, "/additionalItems: it has a meaning only beside"),
    ({"$ref": "http://a/b"}, "/$ref: must be '#' or '#/' and a place in this schema"),
    ({"$ref": "#/$defs/x"}, "/$ref: '#/$defs/x' is not in this schema"),
    ({"$ref": "#/enum/0", "enum": [3]}, "/enum/0: must be an object, true or false"),
    ({"items": {"$id": "a"}}, "/items/$id: only the whole schema may have an id"),
    ({"$ref": "#"}, "the schema: no JSON text that ends can meet it"),
    (
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        "the schema: no JSON text that ends can meet it",
    ),
    ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "the schema: no JSON text"),
    ({"type": "object", "required": ["a"], "additionalProperties": False}, "the schema: no JSON"),
    ({"oneOf": [OPEN, {"type": ["object", "null"]}]}, "/oneOf: its branches 0 and 1 may both"),
    ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "/oneOf: its branches"),
    ({"oneOf": [{"enum": [1, 2]}, {"enum": [2.0]}]}, "/oneOf: its branches"),
]


@pytest.mark.parametrize(("schema", "message"), REFUSED)
def test_what_cannot_be_met_exactly_is_refused_by_its_place(schema: Any, message: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        json_constraint(schema)
    assert refusal.value.message.startswith(message)


def test_what_nests_too_deep_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(101):
        schema = {"items": schema}
    with pytest.raises(InvalidRequest, match="nests deeper than 100"):
        json_constraint(schema)


JUDGED: list[tuple[Any, list[Any]]] = [
    (OPEN, [{}, {"a": 1, "b": [None]}, [], 3]),
    (TAGGED, [{"kind": "cat", "n": 1}, {"kind": "cow", "n": 1}, {"kind": "dog"}, {}]),
    ({"properties": {"a": {"type": "integer"}}}, [{"a": 1}, {"a": "x"}, {}, 3]),
    ({"oneOf": [{"type": "string"}, {"type": "integer"}]}, ["a", 1, None]),
    ({"type": "object", "oneOf": TAGGED["oneOf"]}, [{"kind": "cat", "n": 1}, {"kind": "cat"}]),
    (
        {"$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}}}, "$ref": "#/$defs/t"},
        [[], [[], [[]]], [1], 3],
    ),
    ({"definitions": {"a b": {"const": 1}}, "$ref": "#/definitions/a%20b"}, [1, 2]),
    ({"allOf": [{"minimum": 3}, {"type": "integer", "maximum": 4}]}, [3, 4, 5, 2, "a"]),
    ({"enum": ["a", 1, None, True, [1], {"x": 1}]}, ["a", 1, None, True, [1], {"x": 1}, False, 2]),
    ({"maximum": 2**63 - 1, "type": "integer"}, [5, -5, "a"]),
    ({"exclusiveMaximum": 2**53, "type": "integer"}, [2**53 - 1, 2**53]),
    ({"multipleOf": 0.01, "type": "number"}, [4.5, 0.005]),
    ({"minProperties": 2, "required": ["a", "b"]}, [{"a": 1, "b": 1}, {"a": 1}]),
    ({"uniqueItems": False, "title": "t", "default": 3, "x-order": 1}, [[1, 1], 3]),
    ({"patternProperties": {"^a": {"type": "integer"}}}, [{"ab": 1}, {"ab": "x"}, {}]),
    ({"type": "string", "pattern": "^a|b$"}, ["ax", "xb", "cc"]),
    ({"type": "string", "minLength": 2, "maxLength": 3, "pattern": "é"}, ["éx", "é", "abcd"]),
    ({"type": "string", "pattern": "^a\\x01b$|^c$"}, ["ab", "acb", "c"]),
    ({"type": "string", "pattern": "^[\\x7f]$|^c$"}, ["", "c"]),
    ({"type": "string", "pattern": r"^[&\x41&\&&\\&]$"}, ["&", "A", "\\", "x"]),
    ({"type": "string", "pattern": r'^[^"\\]$'}, ["a", "\\", '"', "\n"]),
    ({"type": "string", "pattern": r"^[\x00-!#-\[\]-\x7e]$"}, ["a", "\\", '"', "\n"]),
    ({"type": "string", "pattern": r'^[^-"]$'}, ["a", "\\", '"', "-", ","]),
    ({"type": "string", "pattern": "^[^{,}]*$"}, ["", "a", "{", "a,"]),
    ({"type": "string", "pattern": "^[(?]$"}, ["(", "?", "a"]),
    ({"type": "string", "pattern": r"^(\\?a)\(?\{,$"}, ["a{,", "\\a({,", "?a{,", "a"]),
    ({"format": "date"}, ["2024-02-29", "2023-02-29", "2000-02-29", "1900-02-29", "0000-01-01"]),
    ({"format": "date"}, ["2024-04-31", "2024-12-31", "2024-10-10", "x", 3]),
]


@pytest.mark.parametrize("pattern", [r"^\P{P}$", r"^[\P{P}]$", r"^[\p{Cc}a]$"])
def test_a_property_has_no_punctuation_that_it_does_not_name(pattern: str) -> None:
    constraint = json_constraint({"type": "string", "pattern": pattern})
    assert accepts(constraint, '"a"')
    assert not accepts(constraint, '"\\\\"') and not accepts(constraint, '"\\""')


@pytest.mark.parametrize(("schema", "values"), JUDGED)
def test_a_grammar_allows_what_jsonschema_calls_valid(schema: Any, values: list[Any]) -> None:
    judge = Draft202012Validator(schema, format_checker=FormatChecker())
    constraint = json_constraint(schema)
    for value in values:
        text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
        assert accepts(constraint, text) == judge.is_valid(value), text


def test_a_name_has_one_spelling_so_that_none_evades_its_schema() -> None:
    """llguidance takes "\\u0061" for another name than "a" otherwise."""
    constraint = json_constraint(
        {"properties": {"a": {"type": "integer"}}, "additionalProperties": True}
    )
    assert accepts(constraint, '{"a":1,"b\\n":"x"}')
    assert not accepts(constraint, '{"\\u0061":"x"}')
    assert not accepts(constraint, '{"b":"\\u0061"}')


def test_keywords_of_earlier_drafts_mean_what_they_meant() -> None:
    items = json_constraint({"items": [{"type": "integer"}], "additionalItems": False})
    assert accepts(items, "[1]") and not accepts(items, "[1,2]") and not accepts(items, '["a"]')
    above = json_constraint({"type": "integer", "minimum": 3, "exclusiveMinimum": True})
    assert accepts(above, "4") and not accepts(above, "3")
    either = json_constraint({"type": "integer", "minimum": 3, "exclusiveMinimum": False})
    assert accepts(either, "3") and not accepts(either, "2")


def test_strict_objects_have_only_the_properties_that_are_named() -> None:
    inner = {"type": "object", "properties": {"b": OPEN, "m": {"additionalProperties": True}}}
    schema = {"properties": {"a": {"$ref": "#/$defs/inner"}}, "$defs": {"inner": inner}}
    for text, is_allowed, is_strict in (
        ('{"a":{"b":{}}}', True, True),
        ('{"a":{"m":{"x":1}}}', True, True),
        ('{"a":{"b":{"x":1}}}', True, False),
        ('{"x":1}', False, False),
        ('{"a":{"x":1}}', False, False),
    ):
        assert accepts(json_constraint(schema), text) == is_allowed
        assert accepts(json_constraint(schema, strict=True), text) == is_strict
    pattern: dict[str, object] = {"patternProperties": {"a": {}}}
    for joined in (
        {"allOf": [pattern, MORE]},
        {**MORE, "$ref": "#/$defs/p", "$defs": {"p": pattern}},
    ):
        with pytest.raises(InvalidRequest, match="with strict, objects have only"):
            json_constraint(joined, strict=True)


INVENTED: list[tuple[Any, list[str], list[str]]] = [
    (BASE, ['{"a":1}'], ['{"a":1,"b":true}']),
    ({"required": ["b"]}, ['{"b":[1]}', "3"], []),
    ({**BASE, "additionalProperties": True}, ['{"a":1,"b":true}'], []),
    ({**BASE, "additionalProperties": {"type": "null"}}, ['{"a":1,"b":null}'], []),
    ({"type": "array", "items": BASE}, ['[{"a":1}]'], ['[{"a":1,"b":true}]']),
    ({"allOf": [BASE, MORE]}, ['{"a":1,"b":true}'], ['{"a":1,"c":1}', '{"b":true}']),
    ({**BASE, "$ref": "#/$defs/m", "$defs": {"m": MORE}}, ['{"a":1,"b":true}'], ['{"a":1,"c":1}']),
    (
        {**BASE, "anyOf": [{**MORE, "required": ["b"]}, {"required": ["c"]}]},
        ['{"a":1,"b":true}', '{"a":1,"c":[]}'],
        ['{"a":1}', '{"a":1,"d":1}'],
    ),
    ({"allOf": [BASE, {"properties": {"a": {"maximum": 3}}}]}, ['{"a":3}'], ['{"a":4}']),
    ({"type": "object", "minProperties": 1}, ['{"a":[1]}'], ["{}"]),
    ({"properties": {"a": False}, "minProperties": 1}, ['{"b":1}'], ["{}"]),
]
"""No properties are invented that are not asked for."""


DOTTED = r"^[a-z]+(\.[a-z]+)+$"
"""A pattern of which llguidance cannot tell whether a text of at most 128 characters meets it."""
NUMBER = ["0", "-1.5", "9" * 15, f"0.{'1' * 10}"], ["9" * 16, f"0.{'1' * 11}", "1e5", "-0"]


BOUNDED: list[tuple[Any, list[str], list[str]]] = [
    ({"type": "integer"}, ["9" * 15, "-" + "9" * 15], ["1" + "0" * 15, "1.0"]),
    ({"type": "integer", "minimum": 0}, ["9" * 15], ["-1", "9" * 16]),
    ({"type": "integer", "minimum": 10**15}, ["1" + "0" * 15], [str(2**53 + 1), "9"]),
    ({"type": "number"}, *NUMBER),
    ({"type": "number", "maximum": 1e-11}, ["0.00000000001"], ["1"]),
    ({"type": "number", "multipleOf": 0.25}, ["0.75"], ["0.7500000", "0.8"]),
    ({}, *NUMBER),
    ({"type": "object"}, ['{"a":9.5}'], [f'{{"a":{"9" * 16}}}', '{"a":[1e9]}']),
    ({"type": "array"}, ["[9.5]"], [f"[[{'9' * 16}]]"]),
    ({"pattern": "^a+$"}, [f'"{"a" * 128}"', "9.5"], [f'"{"a" * 129}"', "9" * 16]),
    ({"type": "string", "pattern": "a"}, [f'"{"a" * 128}"'], [f'"{"a" * 129}"']),
    ({"type": "string", "pattern": "^(a|b{2,})$"}, ['"a"', '"bbb"'], [f'"{"b" * 129}"']),
    ({"type": "string", "pattern": "^a|b$"}, ['"ax"'], [f'"{"a" * 129}"']),
    ({"type": "string", "pattern": "^a{200}b*$"}, [f'"{"a" * 200}"'], ['"a"']),
    ({"type": "string", "pattern": "a", "minLength": 9}, [f'"{"a" * 137}"'], [f'"{"a" * 138}"']),
    ({"type": "string", "pattern": "a", "maxLength": 300}, [f'"{"a" * 300}"'], []),
    ({"type": "string", "pattern": DOTTED}, ['"a.b"', f'"a.{"b" * 62}"'], [f'"a.{"b" * 63}"']),
    ({"type": "string", "pattern": rf"{DOTTED}|b{{99}}$"}, ['"a.b"'], ['"a"']),
    ({"type": "string", "format": "hostname"}, [f'"{"a" * 60}.com"'], [f'"{"a" * 61}.com"']),
    (
        {"type": "string", "format": "uri"},
        [f'"a:{"b" * 126}"'],
        [f'"a:{"b" * 127}"', '"a://[::1]"'],
    ),
    ({"type": "string", "format": "duration"}, ['"P1Y2M3DT4H5M"'], [f'"P{"1" * 5}Y"']),
]
"""What the schema leaves open is bounded."""


FAR = 10**15


FAR_BOUNDS: list[tuple[Any, list[str], list[str]]] = [
    ({"type": "integer", "exclusiveMinimum": FAR - 1}, [str(FAR), str(2**53)], [str(FAR - 1)]),
    ({"type": "integer", "minimum": FAR - 0.5}, [str(FAR), str(2**53)], [str(FAR - 1)]),
    ({"type": "integer", "exclusiveMaximum": 1 - FAR}, [str(-FAR)], [str(1 - FAR)]),
    ({"type": "integer", "exclusiveMinimum": 2**53 - 1}, [str(2**53)], [str(2**53 + 1)]),
    ({"type": "number", "exclusiveMinimum": FAR - 1}, [f"{FAR - 1}.5", str(2**53)], [str(FAR - 1)]),
    ({"type": "number", "exclusiveMaximum": 1 - FAR}, [f"{1 - FAR}.5"], [str(1 - FAR)]),
    ({"type": "integer", "minimum": FAR - 1, "maximum": FAR - 1}, [str(FAR - 1)], [str(FAR)]),
    ({"type": "number", "minimum": FAR, "maximum": FAR}, [str(FAR)], [str(FAR - 1)]),
    ({"multipleOf": 1000, "exclusiveMinimum": FAR - 1000}, [str(FAR)], ["0"]),
    ({"type": "integer", "multipleOf": 7, "exclusiveMinimum": 2**53 - 4}, [str(2**53 + 3)], []),
]
"""Far bounds leave numbers between."""


@pytest.mark.parametrize(
    ("bounds", "allowed", "refused"),
    [
        ({"exclusiveMinimum": 0, "maximum": 1e-11}, ["0.00000000001", "0.000000000003"], ["0"]),
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 1e-20}, [f"0.{'0' * 20}5"], ["0"]),
        ({"minimum": 0.1, "maximum": 0.30000000000000004}, ["0.1", "0.2000000001"], ["0.4"]),
        ({"minimum": -90.123456789012, "maximum": 90}, ["-90.123456789012", "1.5"], ["91"]),
        ({"type": ["number", "null"], "minimum": 1e-12, "maximum": 2e-12}, ["null"], ["0"]),
    ],
)
def test_numbers_between_fine_bounds_end(
    bounds: Any, allowed: list[str], refused: list[str]
) -> None:
    schema = {"type": "number", **bounds}
    constraint = json_constraint(schema)
    assert all(accepts(constraint, text) for text in allowed)
    assert not any(accepts(constraint, text) for text in refused)
    for seed in range(20):
        text = draw_text(constraint, Random(seed), 60)
        assert text is not None
        Draft202012Validator(schema).validate(json.loads(text))


@pytest.mark.parametrize(
    "own",
    [
        {"format": "email", "minLength": 150},
        {"format": "uri", "minLength": 200},
        {"format": "hostname", "minLength": 70},
        {"format": "duration", "minLength": 100},
        {"pattern": "", "minLength": 200},
        {"pattern": DOTTED, "maxLength": 500},
    ],
)
def test_says_plainly_what_it_cannot_find_out(own: Any) -> None:
    assert why_not(json_constraint({"type": "string", **own}), byte_tokenizer()) == (
        "to find out whether a text meets its pattern, format and lengths takes too much"
    )


def test_limits_of_formats_yield_to_patterns_beside_them() -> None:
    for name, pattern, text in (
        ("uri", "^https://a{150}$", f"https://{'a' * 150}"),
        ("uri", r"^http://\[::1\]$", "http://[::1]"),
        ("duration", "^P123456D$", "P123456D"),
        ("time", "z$", "12:00:00z"),
    ):
        schema = {"type": "string", "format": name, "pattern": pattern}
        assert accepts(json_constraint(schema), json.dumps(text))
    long = {"type": "string", "format": "email", "pattern": r"^a@b(\.c){100}$"}
    fault = why_not(json_constraint(long), byte_tokenizer())
    assert fault.startswith("no text that is made for its format meets")


@pytest.mark.parametrize("name", ["date-time", "date", "time"])
def test_dates_and_times_are_what_fromisoformat_reads(name: str) -> None:
    reads = {"date-time": datetime.fromisoformat, "date": date.fromisoformat}.get(name)
    constraint = json_constraint({"type": "string", "format": name})
    drawn = [draw_text(constraint, Random(seed), 60) for seed in range(60)]
    for text in filter(None, drawn):
        (reads or time.fromisoformat)(json.loads(text))
    assert sum(map(bool, drawn)) > 50


def test_whitespace_is_none_or_one_space_after_commas_and_colons() -> None:
    compact, spaced = json_constraint(OPEN), json_constraint(OPEN, space=" ")
    assert accepts(compact, '{"a":[1,2],"b":{}}') and accepts(spaced, '{"a": [1, 2], "b": {}}')
    for text in ('{"a": 1}', '{ "a":1}', '{"a":1 }', '{"a":1}\n', '\n{"a":1}', '{"a":[1 ,2]}'):
        assert not accepts(compact, text)
    for text in ('{"a":1}', '{"a":  1}', '{"a": 1 }', '{"a" : 1}', '{"a": [1,2]}'):
        assert not accepts(spaced, text)


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_can_be_met_and_is(name: str) -> None:
    examples = {
        "date-time": "2024-02-29T12:59:59Z",
        "date": "2024-02-29",
        "time": "23:59:59+01:00",
        "duration": "P1DT2H",
        "email": "a@b.example",
        "hostname": "a.example",
        "ipv4": "127.0.0.1",
        "ipv6": "::1",
        "uuid": "2eb8aa08-aa98-11ea-b4aa-73b441d16380",
        "uri": "http://a.example/b?c#d",
    }
    constraint = json_constraint({"type": "string", "format": name})
    assert accepts(constraint, json.dumps(examples[name]))
    assert not accepts(constraint, '"-"')
    with_pattern = json_constraint({"type": "string", "format": name, "pattern": "[:@.-]|P"})
    assert accepts(with_pattern, json.dumps(examples[name]))


OF_FORMATS: list[tuple[Any, list[str], list[str]]] = [
    ({"type": "integer", "format": "int32"}, ["-2147483648", "2147483647"], ["2147483648"]),
    ({"type": "number", "format": "int32"}, ["7"], ["7.5", "-2147483649"]),
    ({"type": "integer", "format": "int64"}, [str(2**53)], [str(2**53 + 1)]),
    ({"type": "integer", "format": "int64", "minimum": 0, "maximum": 9}, ["9"], ["-1", "10"]),
    ({"type": ["number", "null"], "format": "double"}, ["0.5", "null"], ["1e999", '"a"']),
    ({"type": "string", "format": "email"}, [f'"{"a" * 64}@b.c"'], [f'"{"a" * 65}@b.c"']),
    ({"type": "string", "format": "email"}, [f'"a@{"b" * 63}"'], [f'"a@{"b" * 64}"']),
]
"""Formats have the bounds of their kind."""


@pytest.mark.parametrize(
    ("schema", "allowed", "refused"), [*INVENTED, *BOUNDED, *FAR_BOUNDS, *OF_FORMATS]
)
def test_a_grammar_allows_these_texts_and_refuses_those(
    schema: Any, allowed: list[str], refused: list[str]
) -> None:
    constraint = json_constraint(schema)
    assert all(accepts(constraint, text) for text in allowed)
    assert not any(accepts(constraint, text) for text in refused)


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"type": "string"}, {"type": "integer"}]},
        {"type": "integer", "minimum": 5, "maximum": 4},
        {"type": "string", "pattern": "a", "maxLength": 0},
    ],
)
def test_what_no_value_can_meet_is_noticed(schema: Any) -> None:
    assert "no value can meet" in why_not(json_constraint(schema), byte_tokenizer())
