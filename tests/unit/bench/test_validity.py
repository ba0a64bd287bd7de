"""Drawing schemas, and telling valid replies from others."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from research.bench.server.validity import ValidityConfig, add_sorted, markdown, sort_texts
from srm.engine.constraints.constraint import json_constraint
from tests.kit.engines.drawn_schemas import draw_schema

SCHEMA = {
    "type": "object",
    "properties": {"day": {"type": "string", "format": "date"}},
    "required": ["day"],
}


def test_every_drawn_schema_is_one_that_the_server_keeps_to() -> None:
    for number in range(200):
        schema = draw_schema(random.Random(number))
        Draft202012Validator.check_schema(schema)
        json_constraint(schema)
        assert schema == draw_schema(random.Random(number))


@pytest.mark.parametrize(
    ("text", "reason", "kind"),
    [
        ('{"day":"2024-02-29"}', "stop", "valid"),
        ('{"day":"2024-02-29"}', "length", "valid"),
        ('{"day":"2023-02-29"}', "stop", "invalid"),
        ('{"day":1}', "stop", "invalid"),
        ('{"day":', "stop", "invalid"),
        ('{"day":', "length", "cut"),
        ("", "400: no", "refused"),
    ],
)
def test_each_reply_is_of_one_kind(text: str, reason: str, kind: str) -> None:
    sorted_texts = sort_texts(Counter({(text, reason): 3}), SCHEMA)
    kinds = ("valid", "invalid", "cut", "refused")
    assert {name: sorted_texts[name] for name in kinds if sorted_texts[name]} == {kind: 3}
    assert sorted_texts["reasons"] == (["400: no"] if kind == "refused" else [])
    assert sorted_texts["examples"] == ([text] if kind == "invalid" else [])
    assert sorted_texts["broken"].total() == sorted_texts["invalid"]


def test_invalid_texts_are_counted_by_the_innermost_keywords_that_they_break() -> None:
    kinds = {"a": {"anyOf": [{"type": "string", "maxLength": 2}, {"type": "null"}]}}
    schema = {
        "properties": {**kinds, "b": {"minimum": 0}, "c": {"format": "date"}},
        "required": ["a"],
    }
    texts = {'{"a":"xyz","b":-1}': 2, '{"a":"xyz","c":"1"}': 3, "{}": 4, '{"a"': 5, '{"a":null}': 6}
    texts['{"a":null,"b":NaN}'] = 7
    broken = sort_texts(Counter({(text, "stop"): n for text, n in texts.items()}), schema)["broken"]
    assert broken == {"maxLength": 5, "minimum": 2, "format date": 3, "required": 4, "not JSON": 12}


def test_parts_of_texts_add_up_to_the_whole() -> None:
    days = [f'{{"day":"2023-02-{day}"}}' for day in range(20, 35)]
    texts = Counter({(day, "stop"): number for number, day in enumerate(days, 1)})
    parts = [Counter({key: texts[key]}) for key in texts]
    added = add_sorted(sort_texts(part, SCHEMA) for part in parts)
    assert added == sort_texts(texts, SCHEMA)
    assert added["valid"] and added["invalid"]


def test_the_table_has_a_row_for_each_way() -> None:
    counts = {"valid": 1, "invalid": 0, "cut": 0, "refused": 0, "tokens": 10, "seconds": 2.0}
    ways: tuple[dict[str, int], ...] = ({"table": 5, "masked": 0}, {"table": 0, "masked": 5}, {})
    cases = json.loads(json.dumps([counts | {"rows": rows} for rows in ways]))
    rows = [line.split(" | ")[0] for line in markdown({"cases": cases, "peers": []})[2:]]
    assert rows == ["| masked on the host", "| of this server", "| with a table", "| all"]


def test_a_second_table_compares_servers() -> None:
    counts = {"valid": 1, "invalid": 1, "cut": 3, "refused": 0, "tokens": 10, "seconds": 2.0}
    times = {"new": 0.5, "again": 0.125, "free": 0.0625}
    broken: list[Any] = [{"format": 1, "minimum": 2}, {"format": 1}, {}]
    unknown = {"new": None, "again": None, "free": 0.0625}
    cases = [
        counts | {"rows": {}, "broken": each, "first_token_s": spent}
        for each, spent in zip(broken, (times, times | {"new": 0.25}, unknown), strict=True)
    ]
    none = cases[2] | {"valid": 0, "invalid": 0}
    peers = [
        {"engine": "vLLM", "model": "m", "cases": cases},
        {"engine": "x", "model": "m", "cases": [none]},
    ]
    settings = {"url": "", "model": "models/demo"}
    lines = markdown({"cases": cases, "peers": peers, "settings": settings})
    row = (
        " | 15 | 3 | 3 | 9 | 0 | 5 | 50.00% | 250.0 ms | 375.0 ms | 125.0 ms | 62.5 ms "
        "| `format` 2, `minimum` 2 |"
    )
    assert lines[-3:] == [
        "| srm serve, demo" + row,
        "| vLLM, m" + row,
        "| x, m | 3 | 0 | 0 | 3 | 0 | 5 | — | — | — | — | — | none |",
    ]


@pytest.mark.parametrize("flags", [{"device": "gpu"}, {"dtype": "float8"}])
def test_peers_are_asked_on_a_cpu_in_dtypes_that_they_have(flags: dict[str, Any]) -> None:
    with pytest.raises(
        ValueError, match="peers_dir needs device cpu and dtype float32 or bfloat16"
    ):
        ValidityConfig(peers_dir="peers", **flags)
    ValidityConfig(**flags)
