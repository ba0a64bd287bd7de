"""Messages and tools of a chat: taken, told to a template, and refused with their place."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from msgspec import UNSET

from srm.errors import InvalidRequest
from srm.server.dialects.chat.request import ChatRequest, parse_chat
from srm.server.dialects.messages.request import parse_message
from srm.server.schema.conversation import Conversation
from tests.kit.bodies.refusals import USER, chat, parse_response, refusal
from tests.kit.bodies.refused import ADD, NO_ROOM, named, tool

ANSWER = {"role": "assistant", "content": "ho"}
FUNCTION = {"name": "f", "arguments": "{}"}
TAKEN_MESSAGES = (
    USER,
    {**USER, "name": "Ava"},
    {**USER, "content": ""},
    {**USER, "content": [{"type": "text", "text": "a"}]},
    {"role": "assistant"},
    {**ANSWER, "content": None, "refusal": None, "audio": None, "tool_calls": None},
    {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": FUNCTION}]},
    {"role": "tool", "content": "5"},
    {"role": "developer", "content": "x"},
    {"role": "tool", "content": "5", "id": "msg_1", "is_error": False, "index": 0},
)
WRONG_MESSAGES = (
    *(5, None, {}, {"content": "x"}, {"role": "user"}, {"role": "user", "content": None}),
    {"role": "", "content": "x"},
    *({"role": "user", "content": content} for content in (5, [5], ["x"])),
    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
    {"role": "user", "content": [{"type": "text", "text": "x", "more": "1"}]},
    {**USER, "mood": "good"},
    {**ANSWER, "reasoning_content": ["I thought"]},
    {**ANSWER, "reasoning_details": "I thought"},
    {**ANSWER, "provider_specific_fields": {"thoughts": [{"said": "I thought"}]}},
    {**ANSWER, "audio": {"id": "audio_1"}},
    {**ANSWER, "prefix": True},
    *({**ANSWER, key: json.loads("[" * 500 + '"x"' + "]" * 500)} for key in ("mood", "content")),
    {**ANSWER, "tool_calls": [{"id": "1", "type": "custom", "function": FUNCTION}]},
)


def test_a_wrong_message_is_named_with_its_place() -> None:
    for message in TAKEN_MESSAGES:
        assert chat(messages=[USER, message]).messages[1].role == message["role"]
    for wrong in WRONG_MESSAGES:
        error = refusal(chat, messages=[USER, wrong])
        assert error.param == "messages"
        assert error.message.startswith("messages[1] must be an object with role")
    assert refusal(parse_chat, b"{}").message.startswith("messages must be a list of 1 to 4096")


REPLAYED: tuple[dict[str, Any], ...] = (
    {"refusal": None, "annotations": [], "provider_specific_fields": {"refusal": None}},  # LiteLLM
    {"refusal": None, "annotations": None, "audio": None, "function_call": None},  # openai
    {"reasoning_content": "", "images": [], "thinking_blocks": [{}], "prefix": False},
    {"content": [{"type": "text", "text": "ho", "cache_control": {"type": "ephemeral"}}]},
    {"content": [{"type": "text", "text": "ho", "annotations": [], "id": "part_1"}]},
    {"tool_calls": [{"id": "1", "index": 0, "function": {**FUNCTION, "parsed": None}}]},
    {"tool_calls": [{"id": "1", "function": {**FUNCTION, "parsed_arguments": {"x": "y"}}}]},
    {"parsed": {"x": "y"}},
)


@pytest.mark.parametrize("replayed", REPLAYED)
def test_a_reply_is_sent_back_with_what_clients_add_to_it(replayed: dict[str, Any]) -> None:
    request = chat(messages=[USER, {**ANSWER, **replayed}, USER])
    reported = request.conversation.for_template({"developer"})[1]
    assert {name: reported[name] for name in ANSWER} == ANSWER
    assert set(reported) <= {*ANSWER, "tool_calls"}


def test_templates_get_parts_as_lines_and_arguments_as_objects() -> None:
    user = {**USER, "content": [{"text": "a"}, {"text": "b"}], "name": "Ava"}
    calls = [{"id": "1", "function": {"name": "f", "arguments": x}} for x in ('{"x": 1}', "")]
    assistant = {"role": "assistant", "content": None, "refusal": None, "tool_calls": calls}
    tool = {"role": "tool", "content": "2", "tool_call_id": "1"}
    template = chat(messages=[user, assistant, tool]).conversation.for_template({"developer"})
    assert (template[0], template[2]) == ({**USER, "content": "a\nb", "name": "Ava"}, tool)
    assert template[1]["content"] == ""
    arguments = [call["function"]["arguments"] for call in template[1]["tool_calls"]]
    assert arguments == [{"x": 1}, {}]


def calling(id: str | None, name: str = "f", arguments: str = '{"x": 1}') -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(id: str | None, content: Any = "2", **fields: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": content, **fields}


def histories(arguments: str) -> Iterator[tuple[str, Callable[[], ChatRequest]]]:
    """A chat and a response with an earlier call, with the place of its arguments."""
    messages = [USER, {"role": "assistant", "tool_calls": [calling("1", "f", arguments)]}]
    chat = msgspec.json.encode({"messages": messages})
    yield "messages[1] ", lambda: parse_chat(chat)
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": arguments}
    response = msgspec.json.encode({"input": [USER, call]})
    yield "input[1] ", lambda: parse_response(response)[1]


def test_arguments_of_earlier_calls_are_objects() -> None:
    """They were text of any kind: one template objected, another wrote `"arguments": }`."""
    for given in ("", "  \n", "null", " null ", "{}"):
        for _, parse in histories(given):
            messages = parse().conversation.messages
            texts = [call.function.arguments for call in messages[1].tool_calls or ()]
            assert [msgspec.json.decode(text) for text in texts] == [{}], given
            assert Conversation(messages=messages).as_text().messages[1].text.endswith("{}}")
    faults = (
        "[]",
        "}",
        "1",
        '"x"',
        "no json",
        '{"a": 1',
        '{"a": 1}}',
        '{"a": NaN}',
        '{"a": 1e400}',
    )
    for given in (*faults, "1", '{"a": "\\ud800"}', '{"a": ' + "[" * 9_999 + "]" * 9_999 + "}"):
        for place, parse in histories(given):
            with pytest.raises(InvalidRequest, match="arguments must be JSON of an obj") as raised:
                parse()
            assert raised.value.message.startswith(place)
            assert raised.value.param == place.partition("[")[0]
    block = b'{"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1e400}}'
    body = b'{"max_tokens": 1, "messages": [{"role": "assistant", "content": [%b]}]}' % block
    with pytest.raises(
        InvalidRequest, match=r"^messages\[0\].*arguments must be JSON of an object"
    ):
        parse_message(body)


def test_content_without_a_part_is_an_empty_text() -> None:
    """At every door: Messages refused it, and the others took it."""
    contents: list[Any] = [[], ""]
    for role in ("user", "assistant"):
        for content in contents:
            turns = [{"role": role, "content": content}, USER]
            body = msgspec.json.encode({"messages": turns, "max_tokens": 1})
            _, response = parse_response(msgspec.json.encode({"input": turns}))
            for request in (parse_chat(body), response, parse_message(body)):
                assert [own.text for own in request.messages] == ["", "hi"]
                assert [own.role for own in request.messages] == [role, "user"]


def test_histories_of_other_models_are_taken() -> None:
    thought = {"summary": [{"type": "summary_text", "text": "s"}], "encrypted_content": None}
    items = [
        USER,
        {"type": "reasoning", "id": "rs_1", **thought, "content": [{"type": "reasoning_text"}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}], "phase": "final"},
    ]
    _, chat = parse_response(msgspec.json.encode({"input": items}))
    assert [(own.role, own.text) for own in chat.messages] == [("user", "hi"), ("assistant", "No.")]


def test_what_a_tool_returned_names_a_call_before_it() -> None:
    assistant = {"role": "assistant", "tool_calls": [calling("1"), calling("2", "g")]}
    for results in ([result("1"), result("2")], [result("2")], [result(None)]):
        chat(messages=[USER, assistant, *results, USER])
    wrong: list[tuple[list[dict[str, Any]], int]] = [
        ([USER, result("1")], 1),
        ([USER, assistant, result("3")], 2),
        ([USER, result("1"), assistant], 1),
        ([USER, {"role": "assistant", "tool_calls": [calling(None)]}, result("")], 2),
    ]
    for messages, place in wrong:
        error = refusal(chat, messages=messages)
        assert error.param == "messages"
        assert error.message.startswith(f"messages[{place}]: tool_call_id = ")
        assert "is the id of no tool call in the messages before it" in error.message


def test_calls_and_what_they_returned_are_shown_as_text() -> None:
    calls = [calling("1"), calling("2", "g", "{}"), calling(None, "h")]
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "system", "content": "be kind"},
        {**USER, "name": "Ava"},
        {"role": "assistant", "content": "Let me see.", "tool_calls": calls},
        *(result("2"), result("1", parts), result(None, "4", name="h"), result(None, "5")),
        {"role": "assistant", "content": None, "tool_calls": calls[:1]},
        result("1", "6"),
        USER,
    ]
    written = '{"name":"f","arguments":{"x": 1}}\n{"name":"g","arguments":{}}\n'
    written += '{"name":"h","arguments":{"x": 1}}'
    returned = "Result of g: 2\nResult of f: a\nb\nResult of h: 4\nResult of the tool: 5"
    text = chat(messages=messages).conversation.as_text()
    assert text.for_template(set()) == [
        *messages[:2],
        {"role": "assistant", "content": f"Let me see.\n{written}"},
        {"role": "user", "content": returned},
        {"role": "assistant", "content": '{"name":"f","arguments":{"x": 1}}'},
        {"role": "user", "content": "Result of f: 6"},
        USER,
    ]


def test_the_prompt_ends_where_the_answer_begins() -> None:
    continued = {"messages": [USER, ANSWER], "continue_final_message": True}
    for fields, adds in (({}, True), ({"add_generation_prompt": False}, False), (continued, False)):
        assert chat(**fields).conversation.adds_generation_prompt == adds


def called(request: ChatRequest) -> tuple[list[str], bool, bool]:
    assert request.calls is not None
    names = [function.name for function in request.calls.functions]
    return names, request.calls.is_named, request.calls.are_several


def test_a_choice_says_which_functions_are_called() -> None:
    tools = [ADD, tool("sub-2")]
    cases: list[tuple[dict[str, Any], Any]] = [
        ({"tool_choice": "required"}, (["add", "sub-2"], False, False)),
        ({"tool_choice": named("sub-2")}, (["sub-2"], True, False)),
        *(({"tool_choice": "required", "parallel_tool_calls": parallel},
           (["add", "sub-2"], False, parallel)) for parallel in (True, False)),
        # What may be several may be one: the request names it.
        ({"tool_choice": named("add"), "parallel_tool_calls": True}, (["add"], True, False)),
    ]  # fmt: skip
    for fields, expected in cases:
        assert called(chat(tools=tools, **fields)) == expected
    for fields in ({}, {"tools": []}, {"tools": tools, "tool_choice": "none"}, {"tools": None}):
        for parallel in (None, True, False):
            assert chat(**fields, parallel_tool_calls=parallel).calls is None
    assert chat(tools=[], tool_choice="auto").calls is None


def test_by_default_a_reply_may_be_a_call() -> None:
    for fields in ({}, {"tool_choice": "auto"}, {"tool_choice": None}):
        request = chat(tools=[ADD], **fields)
        assert request.calls is not None and request.calls.may_be_text
        assert not request.calls.is_one_function and request.conversation.tells_tools
        assert request.calls.is_text("3") and request.calls.is_text("")
        assert not request.calls.is_text('{"na') and not request.calls.is_text("[{")
    required = chat(tools=[ADD], tool_choice="required")
    assert required.calls is not None and not required.calls.is_text("3")
    assert not required.conversation.tells_tools


def test_templates_get_all_tools_that_may_be_called() -> None:
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


@pytest.mark.parametrize("fields", NO_ROOM)
def test_takes_without_a_call_what_it_leaves_no_room_for(fields: dict[str, Any]) -> None:
    assert chat(tools=[ADD], tool_choice="none", **fields).calls is None
    assert chat(tools=[ADD], tool_choice="required", response_format={"type": "text"}).calls
