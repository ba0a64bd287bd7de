"""What `tests.tools.measures` counts."""

from __future__ import annotations

import ast
import json
import subprocess
import sys

import pytest

from tests.serving import ROOT
from tests.tools.syntax import count_parameters, fills_json, find_private, has_token_fields


def test_a_stream_is_followed_from_its_request_to_the_device_and_back() -> None:
    printed = subprocess.check_output([sys.executable, "-m", "tests.tools.road"], cwd=ROOT)
    ways = json.loads(printed)
    assert {*ways} == {"files", "in", "engine", "back"}
    assert all(1 < files < functions > deepest for files, functions, deepest in
               (ways["in"], ways["engine"], ways["back"]))  # fmt: skip


@pytest.mark.parametrize(
    ("source", "fills"),
    [
        ("example.split(_CHOICES)", True),
        ("example.split(b'%d' % _MARK)", True),
        ("choice.partition(b'null')", True),
        ("x = b'{\"tokens\":[%b]}' % tokens", True),
        ("head.split(b'\\r\\n')", False),
        ("name.partition('null')", False),
    ],
)
def test_json_that_is_filled_by_a_mark_or_by_hand_is_found(source: str, fills: bool) -> None:
    assert fills_json([*ast.walk(ast.parse(source))]) == fills


@pytest.mark.parametrize(
    ("source", "is_of_tokens"),
    [
        ("token_ids: I32; logprobs: F32; top_ids: I32; top_logprobs: F32", True),
        ("tokens: I32; logprob: F32; alternatives: I32; finish_reason: str", True),
        ("token_ids: I32; logprobs: F32; reasons: I32", False),
    ],
)
def test_a_class_of_tokens_is_found_however_it_spells_them(source: str, is_of_tokens: bool) -> None:
    (node,) = ast.parse(f"class A: {source}").body
    assert isinstance(node, ast.ClassDef) and has_token_fields(node) == is_of_tokens


def test_parameters_and_private_names_are_counted_without_ones_own() -> None:
    (method,) = ast.parse("def f(self, a, /, b, *c, d): self._x = a._y.__class__").body
    assert isinstance(method, ast.FunctionDef) and count_parameters(method) == 3
    assert [name for node in ast.walk(method) for name in find_private(node)] == ["_y"]
    assert find_private(ast.parse("from a import _b, c").body[0]) == ["_b"]
