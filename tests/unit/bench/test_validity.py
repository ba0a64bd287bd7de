"""Drawing schemas, and telling valid replies from others."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest
from jsonschema import Draft202012Validator

from bench.server.validity import add_sorted, draw_schema, markdown, sort_texts
from srm.engine.constraints.constraint import json_constraint

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
    rows = [line.split(" | ")[0] for line in markdown({"cases": cases})[2:]]
    assert rows == ["| masked on the host", "| of this server", "| with a table", "| all"]
