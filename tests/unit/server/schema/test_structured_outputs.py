"""The fields that say what a completion may be, and those of others that mean the same."""

from __future__ import annotations

from typing import Any

import pytest

from srm.server.schema.structured_outputs import SUCCESSORS
from tests.kit.bodies.refusals import chat, completion, refusal

SCHEMA = {"type": "json_schema", "json_schema": {"schema": {}}}
REGEX = {"regex": "a"}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "grammar"}}, "response_format", "must be an object with type:"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema must be there"),
    ({"response_format": {**SCHEMA, "type": "text"}}, "response_format", "type is text"),
    ({"response_format": {**SCHEMA, "extra": 1}}, "response_format", "extra is not a field"),
    ({"structured_outputs": {}}, "structured_outputs", "exactly one of json"),
    ({"structured_outputs": {**REGEX, "choice": ["a"]}}, "structured_outputs", "got regex, choice"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs", "json_object: true"),
    ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs", "must be an object"),
    ({"structured_outputs": {"json": {}, "backend": 1}}, "structured_outputs", "backend is not"),
    (
        {"structured_outputs": {**REGEX, "whitespace_pattern": ""}},
        "structured_outputs",
        "whitespace_pattern is about JSON, not about regex",
    ),
    (
        {"structured_outputs": {"json": {}, "whitespace_pattern": "\\s*"}},
        "structured_outputs",
        "'' or one space",
    ),
    (
        {"structured_outputs": {"json": {}, "disable_any_whitespace": False}},
        "structured_outputs",
        "whitespace is never free",
    ),
    ({"structured_outputs": REGEX, "response_format": SCHEMA}, "structured_outputs", "both say"),
    ({"structured_outputs": REGEX, "ignore_eos": True}, "ignore_eos", "does not go with"),
]
LARGE = {"title": "a" * 10_000_000}
"""A schema of 10 MB."""
REFUSED += [
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": LARGE}}},
     "response_format", "1048576 bytes"),
    ({"structured_outputs": {"json": LARGE}}, "structured_outputs", "1048576 bytes"),
]  # fmt: skip
REFUSED += [({name: {}}, name, f"its name is {new}") for name, new in SUCCESSORS.items()]


@pytest.mark.parametrize(("fields", "param", "message"), REFUSED)
def test_what_is_not_honoured_is_refused_by_name(
    fields: dict[str, Any], param: str, message: str
) -> None:
    for parse in (completion, chat):
        error = refusal(parse, **fields)
        assert error.param == param and message in error.message


def test_a_constraint_is_of_tokens_that_are_sampled() -> None:
    error = refusal(completion, max_tokens=0, echo=True, structured_outputs=REGEX)
    assert error.param == "max_tokens"
