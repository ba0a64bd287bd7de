"""Lines that people and everyday tools write, which are no JSON: every door says what is wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from srm.errors import SRMError, not_json_line
from srm.loadtest import trace
from srm.loadtest.counter_rng import Draws
from srm.loadtest.workload.prompts import Prompts
from srm.server.batch.job_input import check_input
from srm.server.batch.lines import BatchLine
from srm.server.commands import score_lines
from srm.server.commands.batch_input import parse
from srm.server.text.text import Text
from srm.training.text.rows import rows

COMMA = "a comma follows the object; it must be one JSON object a line, no commas"
BRACKET = "an array's bracket; it must be one JSON object a line, no brackets"


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (b'{"prompt": "a"},', COMMA),
        (b'{"prompt": "a"}, \r\n', COMMA),
        (b'{"prompt": "a"},,', "trailing characters (byte 16)"),
        (b"[\n", BRACKET),
        (b'[{"prompt": "a"},', BRACKET),
        (b'{"prompt": "a"}]', BRACKET),
        (b"],", BRACKET),
        (b"{\n", "the object does not end here; it must be one JSON object a line"),
        ('{"prompt": "caf\xe9"}'.encode("latin-1"), "byte 0xe9 in position 15 is not UTF-8"),
        ('{"prompt": "a"}'.encode("utf-16"), "bytes of 0, as UTF-16 has"),
        ('{"prompt": "a"}'.encode("utf-16-be"), "bytes of 0, as UTF-16 has"),
        (b'{"prompt": "a\0b"}', "JSON is malformed: invalid character (byte 13)"),
        (b'"a\0"', "JSON is malformed: invalid character (byte 2)"),
        (b"{'prompt': 'a'}", "(byte 1)"),
        (b'{"a":' * 100_000, "recursion"),
        (b'{"prompt": "a"}', ""),
        (b'[{"prompt": "a"}, {"prompt": "b"}]', BRACKET),
        (b"5", ""),
    ],
)
def test_what_is_wrong_with_a_line_is_said(line: bytes, fault: str) -> None:
    assert fault in not_json_line(line) and bool(fault) == bool(not_json_line(line))


def batch_file(path: Path) -> str:
    (error, *_) = check_input(path, "/v1/completions", 1_000_000).errors
    return f"{path}:{error.line}: {error.message}"


def batch_command(path: Path) -> str:
    for number, raw in enumerate(path.read_bytes().splitlines(), 1):
        if not isinstance(line := parse(raw, number), BatchLine):
            return f"{path}:{line.line}: {line.message}"
    return "nothing"


def score(path: Path, text: Text) -> str:
    for number, raw in enumerate(path.read_bytes().splitlines(), 1):
        try:
            score_lines.parse(raw, number, text)
        except SRMError as error:
            return f"{path}:{number}: {error.message}"
    return "nothing"


def test_every_door_says_what_is_wrong_with_a_line_and_which(
    text_model: Path, tmp_path: Path
) -> None:
    """They spoke of unknown fields, and of fields that are missing."""
    text, path = Text(text_model), tmp_path / "in.jsonl"
    line: dict[str, object] = {"method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}
    doors: list[tuple[Callable[[Path], object], dict[str, object]]] = [
        (batch_file, line | {"custom_id": "a"}),
        (batch_command, {"prompt": "a"}),
        (lambda path: score(path, text), {"prompt": "a"}),
        (trace.read, {"timestamp": 1}),
        (lambda path: Prompts(path, "completions", None, Draws(0)), {"prompt": "a"}),
        (lambda path: list(rows(path, "texts")), {"text": "a"}),
    ]
    for door, row in doors:
        valid, odd = json.dumps(row), json.dumps(row | {"note": "é"}, ensure_ascii=False)
        for bad, fault in (
            (valid.encode() + b",", COMMA),
            (odd.encode("latin-1"), f"byte 0xe9 in position {odd.index('é')} is not UTF-8"),
        ):
            path.write_bytes(valid.encode() + b"\n" + bad)
            try:
                message = str(door(path))
            except SRMError as error:
                message = error.message
            assert fault in message and re.search(r"(line |:)2: ", message), (door, message)
