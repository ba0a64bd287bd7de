"""The grammar of calls: each function's own arguments, and as many calls as were asked for."""

from __future__ import annotations

from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from srm.engine.config import DEMO_MODEL
from srm.errors import InvalidRequest
from srm.server.schema.tools import MOST_CALLS
from srm.server.text.tool_calls import call_constraint

NODE: dict[str, Any] = {
    "type": "object",
    "properties": {"v": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
    "required": ["v", "next"],
    "additionalProperties": False,
}
WORDS: dict[str, Any] = {
    "$defs": {"W": {"type": "string"}},
    "type": "object",
    "properties": {"word": {"$ref": "#/$defs/W"}},
    "required": ["word"],
    "additionalProperties": False,
}
FUNCTIONS: list[dict[str, Any]] = [
    {"name": "list", "parameters": NODE},
    {"name": "say-2", "parameters": WORDS},
    {"name": "now"},
]


def constraint(
    *functions: dict[str, Any], are_several: bool = False, may_be_text: bool = False
) -> str:
    return call_constraint(
        {"functions": functions, "are_several": are_several, "may_be_text": may_be_text}, []
    )


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return LLTokenizer((DEMO_MODEL / "tokenizer.json").read_text())


def is_allowed(tokenizer: LLTokenizer, constraint: str, text: str) -> bool:
    assert not LLMatcher.validate_grammar(constraint, tokenizer)
    matcher = LLMatcher(tokenizer, constraint)
    tokens = tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def test_the_only_function_is_called_by_its_arguments(tokenizer: LLTokenizer) -> None:
    only = constraint(FUNCTIONS[0])
    assert is_allowed(tokenizer, only, '{"v":1,"next":{"v":2,"next":null}}')
    assert not is_allowed(tokenizer, only, '{"name":"list","arguments":{"v":1,"next":null}}')
    nothing = constraint(FUNCTIONS[2])
    assert is_allowed(tokenizer, nothing, "{}") and not is_allowed(tokenizer, nothing, '{"v":1}')


def test_writes_arguments_without_a_name_where_asked(tokenizer: LLTokenizer) -> None:
    named = {"properties": {"x": {"type": "integer"}}}
    for strict, parameters, expected in (
        (None, named, False),
        (True, named, False),
        (False, named, False),
        (True, named | {"additionalProperties": {"type": "integer"}}, True),
    ):
        given = constraint({"name": "f", "parameters": parameters, "strict": strict})
        assert is_allowed(tokenizer, given, '{"x":1}')
        assert is_allowed(tokenizer, given, '{"x":1,"y":2}') == expected
        assert not is_allowed(tokenizer, given, "[]")


def test_a_wrong_schema_is_named_with_its_function_and_place() -> None:
    wrong = {"properties": {"x": {"type": "integer", "minimun": 3}}}
    with pytest.raises(InvalidRequest, match=r"^parameters of g: /properties/x/minimun: .*minimum"):
        constraint(FUNCTIONS[0], {"name": "g", "parameters": wrong, "strict": True})


def test_each_function_has_its_own_schema_and_references(tokenizer: LLTokenizer) -> None:
    either = constraint(*FUNCTIONS)
    calls = [
        '{"name":"list","arguments":{"v":1,"next":{"v":2,"next":null}}}',
        '{"name":"say-2","arguments":{"word":"list"}}',
        '{"name":"now","arguments":{}}',
    ]
    assert all(is_allowed(tokenizer, either, call) for call in calls)
    wrong = [
        '{"name":"list","arguments":{"word":"list"}}',
        '{"name":"say","arguments":{"word":"list"}}',
        '{"name":"now","arguments":{"v":1}}',
        '{"name":"now"}',
        f"[{calls[0]}]",
        calls[2] + " ",
        "no",
    ]
    assert not any(is_allowed(tokenizer, either, call) for call in wrong)


@pytest.mark.parametrize("are_several", [False, True])
def test_text_without_calls_has_no_brace(tokenizer: LLTokenizer, are_several: bool) -> None:
    given = constraint(FUNCTIONS[2], are_several=are_several, may_be_text=True)
    now = '{"name":"now","arguments":{}}'
    calls = f"[{now}]" if are_several else now
    for text in (calls, "", "Hello, {you}\n[1]", "é", " {"):
        assert is_allowed(tokenizer, given, text), text
    for text in ("{}", "[]", "{", calls + "x", now if are_several else f"[{now}]"):
        assert not is_allowed(tokenizer, given, text), text


def test_several_calls_are_a_list_of_some(tokenizer: LLTokenizer) -> None:
    list_call = '{"name":"list","arguments":{"v":1,"next":null}}'
    now = '{"name":"now","arguments":{}}'
    several = constraint(*FUNCTIONS, are_several=True)
    for texts in ([now], [now, list_call, now], [now] * MOST_CALLS):
        assert is_allowed(tokenizer, several, f"[{','.join(texts)}]")
    for texts in ([], ["{}"], [now] * (MOST_CALLS + 1)):
        assert not is_allowed(tokenizer, several, f"[{','.join(texts)}]")
    assert not is_allowed(tokenizer, several, now)
    only = constraint(FUNCTIONS[2], are_several=True)
    assert is_allowed(tokenizer, only, f"[{now},{now}]") and not is_allowed(tokenizer, only, "{}")
