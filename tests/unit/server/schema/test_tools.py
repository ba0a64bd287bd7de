"""Tools of a chat: what is taken, what must be called, and what is refused with its place."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import UNSET

from srm.server.dialects.chat.request import ChatRequest, parse_chat
from tests.kit.bodies.refusals import USER, chat, refusal


def tool(name: str = "add", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


ADD = tool(parameters={"type": "object", "properties": {"x": {"type": "integer"}}})
WAYS = '"none", "auto", "required", or {"type": "function", "function": {"name": …}}'


def called(request: ChatRequest) -> tuple[list[str], bool, bool]:
    assert request.calls is not None
    names = [function.name for function in request.calls.functions]
    return names, request.calls.is_named, request.calls.are_several


def test_a_choice_says_which_functions_are_called() -> None:
    tools = [ADD, tool("sub-2")]
    cases: list[tuple[dict[str, Any], Any]] = [
        ({"tool_choice": "required"}, (["add", "sub-2"], False, False)),
        ({"tool_choice": named("sub-2")}, (["sub-2"], True, False)),
        (
            {"tool_choice": "required", "parallel_tool_calls": True},
            (["add", "sub-2"], False, True),
        ),
        (
            {"tool_choice": "required", "parallel_tool_calls": False},
            (["add", "sub-2"], False, False),
        ),
        # What may be several may be one: the request names it.
        ({"tool_choice": named("add"), "parallel_tool_calls": True}, (["add"], True, False)),
    ]
    for fields, expected in cases:
        assert called(chat(tools=tools, **fields)) == expected
    for fields in ({}, {"tools": []}, {"tools": tools, "tool_choice": "none"}, {"tools": None}):
        for parallel in (None, True, False):
            assert chat(**fields, parallel_tool_calls=parallel).calls is None
    assert chat(tools=[], tool_choice="auto").calls is None


def test_by_default_a_reply_may_be_a_call_and_the_model_is_told_of_which() -> None:
    for fields in ({}, {"tool_choice": "auto"}, {"tool_choice": None}):
        request = chat(tools=[ADD], **fields)
        assert request.calls is not None and request.calls.may_be_text
        assert not request.calls.is_one_function and request.conversation.tells_tools
        assert request.calls.is_text("3") and request.calls.is_text("")
        assert not request.calls.is_text('{"na') and not request.calls.is_text("[{")
    required = chat(tools=[ADD], tool_choice="required")
    assert required.calls is not None and not required.calls.is_text("3")
    assert not required.conversation.tells_tools


def test_a_template_is_shown_all_tools_and_none_that_may_not_be_called() -> None:
    tools = [ADD, tool("sub", description="take away", parameters=None)]
    request = chat(tools=tools, tool_choice=named("add"))
    assert [own.function.name for own in request.conversation.tools] == ["add", "sub"]
    assert chat(tools=tools, tool_choice="none").conversation.tools == []


def test_parameters_stay_the_json_that_they_were() -> None:
    """What reads a schema refuses a name that it has twice; it must not be gone before."""
    twice = '{"properties": {}, "properties": {"x": {}}}'
    for parameters in ("null", "{}", twice):
        body = (
            '{"messages": [{"role": "user", "content": "x"}], "tool_choice": "required", "tools": '
            f'[{{"type": "function", "function": {{"name": "f", "parameters": {parameters}}}}}]}}'
        )
        calls = parse_chat(body.encode()).calls
        assert calls is not None
        own = calls.functions[0].parameters
        assert own is not UNSET and bytes(own).decode() == parameters


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": "add"}, "tools", "tools must be a list of at most 128 functions"),
    ({"tools": [ADD] * 129}, "tools", "tools must be a list of at most 128 functions"),
    ({"tools": [tool(description="x" * 2**20)]}, "tools", "in at most 1048576 bytes"),
    ({"tools": [ADD, 5]}, "tools", "tools[1] must be an object"),
    ({"tools": [{"function": {"name": "f"}}]}, "tools", "tools[0] must be an object"),
    ({"tools": [{"type": "custom", "custom": {}}]}, "tools", "type: Invalid enum value 'custom'"),
    ({"tools": [{"type": "function"}]}, "tools", "function is missing"),
    ({"tools": [tool("")]}, "tools", "function.name must be a string matching"),
    ({"tools": [tool("a b")]}, "tools", "function.name must be a string matching"),
    ({"tools": [tool("x" * 65)]}, "tools", "function.name must be a string matching"),
    ({"tools": [tool("f\n")]}, "tools", "function.name must be a string matching"),
    ({"tools": [tool(more=1)]}, "tools", "function.more is not a field"),
    ({"tools": [tool(strict="yes")]}, "tools", "function.strict must be"),
    ({"tools": [tool(parameters=[1])]}, "tools", "tools[0] must be an object"),
    (
        {"tools": [ADD, tool("g", parameters={"type": "array"})]},
        "tools",
        'tools[1].function.parameters.type must be "object", since arguments have names; got "arr',
    ),
    ({"tools": [ADD, tool("g"), ADD]}, "tools", 'tools[2].function.name = "add" is the name of'),
    ({"tools": [ADD], "tool_choice": "any"}, "tool_choice", f"tool_choice must be {WAYS}"),
    ({"tools": [ADD], "tool_choice": named("sub")}, "tool_choice", '"sub" is not in tools: add'),
    ({"tools": [ADD], "tool_choice": {"type": "function", "name": "add"}}, "tool_choice", WAYS),
    ({"tools": [ADD], "tool_choice": {"type": "allowed_tools"}}, "tool_choice", WAYS),
    ({"tool_choice": "required"}, "tool_choice", "needs tools, which are missing"),
    ({"tool_choice": named("add"), "tools": []}, "tool_choice", "needs tools, which are missing"),
    ({"tools": [ADD], "parallel_tool_calls": "yes"}, "parallel_tool_calls", "true or false"),
    (
        {"tools": [ADD], "tool_choice": "required", "chat_template_kwargs": {"tools": []}},
        "chat_template_kwargs",
        "'tools'",
    ),
]


@pytest.mark.parametrize(("fields", "param", "message"), WRONG)
def test_what_cannot_be_called_is_refused_by_its_field(
    fields: dict[str, Any], param: str, message: str
) -> None:
    error = refusal(chat, **fields)
    assert error.param == param
    assert message in error.message


@pytest.mark.parametrize(
    "fields",
    [
        {"continue_final_message": True, "messages": [USER, {"role": "assistant", "content": "I"}]},
        {"ignore_eos": True},
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": "a"}},
    ],
)
def test_what_a_call_leaves_no_room_for_is_refused(fields: dict[str, Any]) -> None:
    (name, *_) = fields
    error = refusal(chat, tools=[ADD], tool_choice="required", **fields)
    assert error.param == name
    asks = 'tool_choice = "required", by which tools are called'
    assert error.message == f"{name} does not go with {asks}"
    error = refusal(chat, tools=[ADD], **fields)
    assert error.param == name and 'tool_choice = "auto"' in error.message
    assert chat(tools=[ADD], tool_choice="none", **fields).calls is None
    assert chat(tools=[ADD], tool_choice="required", response_format={"type": "text"}).calls
