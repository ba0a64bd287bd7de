"""What a chat request may say, and the completion it stands for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.errors import InvalidRequest
from server.schema.chat_request import ChatRequest, parse_chat
from server.schema.completion_request import CompletionRequest
from server.schema.conversation import MAX_MESSAGES

USER = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "ho"}
FUNCTION = {"name": "f", "arguments": "{}"}


def parse(*messages: Any, **fields: Any) -> ChatRequest:
    return parse_chat(json.dumps({"messages": list(messages) or [USER], **fields}).encode())


def completion(**fields: Any) -> CompletionRequest:
    return parse(**fields).as_completion("a prompt", n_ctx=99)


def test_defaults() -> None:
    assert completion() == CompletionRequest(
        prompt=["a prompt"], max_tokens=99, add_special_tokens=False
    )
    nulls = {name: None for name in ChatRequest.__struct_fields__ if name != "messages"}
    assert parse(**nulls) == parse()


def test_what_completions_have_too_is_passed_on() -> None:
    given = {"n": 3, "temperature": 0.5, "top_k": 4, "seed": 5, "stop": ["x"], "ignore_eos": True}
    options = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    found, plain = completion(**given, **options), CompletionRequest(prompt=[""])
    for name in CompletionRequest.__struct_fields__:
        if name in given or name == "stream":
            assert getattr(found, name) == {**given, **options}[name] != getattr(plain, name)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, 99),
        ({"max_tokens": 7}, 7),
        ({"max_completion_tokens": 8}, 8),
        ({"max_tokens": 7, "max_completion_tokens": 7}, 7),
    ],
)
def test_the_longest_answer_has_two_names(fields: dict[str, Any], expected: int) -> None:
    assert completion(**fields).max_tokens == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"logprobs": False, "top_logprobs": None}, None),
        ({"logprobs": False, "top_logprobs": 0}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 0}, 0),
        ({"logprobs": True, "top_logprobs": 20}, 20),
    ],
)
def test_logprobs(fields: dict[str, Any], expected: int | None) -> None:
    assert completion(**fields).logprobs == expected


@pytest.mark.parametrize(
    "message",
    [
        USER,
        {**USER, "name": "Ava"},
        {**USER, "content": ""},
        {**USER, "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant"},
        {**ANSWER, "content": None, "refusal": None, "audio": None, "tool_calls": None},
        {
            "role": "assistant",
            "tool_calls": [{"id": "1", "type": "function", "function": FUNCTION}],
        },
        {"role": "tool", "content": "5", "tool_call_id": "1"},
        {"role": "developer", "content": "x"},
        {"role": "tool", "content": "5", "id": "msg_1", "is_error": False, "index": 0},
    ],
)
def test_messages_that_are_taken(message: dict[str, Any]) -> None:
    assert parse(USER, message).messages[1].role == message["role"]


@pytest.mark.parametrize(
    "message",
    [
        5,
        None,
        {},
        {"content": "x"},
        {"role": "user"},
        {"role": "user", "content": None},
        {"role": "robot", "content": "x"},
        {"role": "user", "content": 5},
        {"role": "user", "content": [5]},
        {"role": "user", "content": ["x"]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        {"role": "user", "content": [{"type": "text", "text": "x", "more": "1"}]},
        {**USER, "mood": "good"},
        {**ANSWER, "reasoning_content": "I thought"},
        {**ANSWER, "provider_specific_fields": {"thoughts": [{"said": "I thought"}]}},
        {**ANSWER, "audio": {"id": "audio_1"}},
        {**ANSWER, "prefix": True},
        {**ANSWER, "mood": json.loads("[" * 500 + '"x"' + "]" * 500)},
        {**ANSWER, "content": json.loads("[" * 500 + '"x"' + "]" * 500)},
        {**ANSWER, "tool_calls": [{"id": "1", "type": "custom", "function": FUNCTION}]},
    ],
)
def test_a_wrong_message_is_named_with_its_place(message: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^messages\[1\] must be an object with role") as no:
        parse(USER, message)
    assert no.value.param == "messages"


@pytest.mark.parametrize(
    "replayed",
    [
        {
            "refusal": None,
            "annotations": [],
            "provider_specific_fields": {"refusal": None},
        },  # LiteLLM
        {"refusal": None, "annotations": None, "audio": None, "function_call": None},  # openai
        {"reasoning_content": "", "images": [], "thinking_blocks": [{}], "prefix": False},
        {"content": [{"type": "text", "text": "ho", "cache_control": {"type": "ephemeral"}}]},
        {"content": [{"type": "text", "text": "ho", "annotations": [], "id": "part_1"}]},
        {"tool_calls": [{"id": "1", "index": 0, "function": {**FUNCTION, "parsed": None}}]},
    ],
)
def test_a_reply_is_sent_back_with_what_clients_add_to_it(replayed: dict[str, Any]) -> None:
    told = parse(USER, {**ANSWER, **replayed}, USER).conversation.for_template(True)[1]
    assert {name: told[name] for name in ANSWER} == ANSWER
    assert set(told) <= {*ANSWER, "tool_calls"}


@pytest.mark.parametrize("messages", [None, [], {}, "hi", 5, [USER] * (MAX_MESSAGES + 1)])
def test_messages_are_a_list_that_is_not_empty_and_not_endless(messages: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^messages must be a list of 1 to 4096"):
        parse_chat(json.dumps({"messages": messages}).encode())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_completion_tokens", 0),
        ("max_completion_tokens", "5"),
        ("logprobs", 1),
        ("top_logprobs", 21),
        ("top_logprobs", True),
        ("add_generation_prompt", "yes"),
        ("continue_final_message", 1),
        ("chat_template_kwargs", []),
        ("chat_template_kwargs", "x"),
        ("n", 0),
        ("safety_identifier", 5),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"^{field} must be .+; got ") as refused:
        parse(**{field: value})
    assert refused.value.param == field


@pytest.mark.parametrize(
    ("field", "neutral", "asking"),
    [
        ("tools", [], [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "none", "required"),
        ("tool_choice", "auto", {"type": "function", "function": {"name": "f"}}),
        ("functions", [], [{"name": "f"}]),
        ("response_format", {"type": "text"}, {"type": "json_object"}),
        ("modalities", ["text"], ["text", "audio"]),
        ("store", False, True),
        ("chat_template", None, "{{ 1 }}"),
        ("structured_outputs", None, {"regex": "x"}),
        ("reasoning_effort", None, "high"),
    ],
)
def test_what_is_not_done_may_be_neutral_and_nothing_else(
    field: str, neutral: Any, asking: Any
) -> None:
    assert parse(**{field: neutral}) == parse()
    with pytest.raises(InvalidRequest, match=f"^{field} = .* is not supported") as refused:
        parse(**{field: asking})
    assert refused.value.param == field


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("max_tokens", {"max_tokens": 5, "max_completion_tokens": 6}),
        ("top_logprobs", {"top_logprobs": 1}),
        ("top_logprobs", {"top_logprobs": 1, "logprobs": False}),
        ("add_generation_prompt", {"add_generation_prompt": True, "continue_final_message": True}),
        ("continue_final_message", {"messages": [USER, {"role": "assistant"}],
                                    "continue_final_message": True}),
        ("chat_template_kwargs", {"chat_template_kwargs": {"messages": []}}),
        ("chat_template_kwargs", {"chat_template_kwargs": {"add_generation_prompt": False}}),
        ("stream_options", {"stream_options": {"include_usage": True}}),
        ("prompt", {"prompt": "x"}),
        ("prompt_logprobs", {"prompt_logprobs": 1, "return": "counts"}),
    ],
)  # fmt: skip
def test_fields_that_do_not_go_together(field: str, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_chat(json.dumps({"messages": [USER], **fields}).encode())
    assert refused.value.param == field


def test_the_prompt_ends_where_the_answer_begins_unless_asked_otherwise() -> None:
    assert parse().conversation.adds_generation_prompt
    assert not parse(add_generation_prompt=False).conversation.adds_generation_prompt
    continued = parse(USER, ANSWER, continue_final_message=True)
    assert not continued.conversation.adds_generation_prompt
