"""Fields × dialects: a value that asks for nothing is taken by every route that has prompts.

The table is made of the schemas, so a field that is added has its row.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from srm.errors import InvalidRequest
from srm.server.dialects.chat.request import ChatRequest, ChatsRequest, parse_chat, parse_chats
from srm.server.dialects.chat.tokenize import (
    DetokenizeRequest,
    TokenizeRequest,
    parse_detokenize,
    parse_tokenize,
)
from srm.server.dialects.messages.request import (
    MESSAGE_NEUTRAL,
    CountRequest,
    MessageRequest,
    parse_count,
    parse_message,
)
from srm.server.dialects.responses.request import RESPONSE_NEUTRAL, ResponseRequest
from srm.server.dialects.rollouts.requests import (
    GENERATE_NEUTRAL,
    TOKENS_NEUTRAL,
    GenerateRequest,
    TokensRequest,
    parse_generate,
    parse_tokens,
)
from srm.server.schema.completion_request import CompletionRequest, parse_completion
from srm.server.schema.sampling_fields import NEUTRAL
from srm.server.schema.validation import Fields, defaults_of, hints_of
from tests.kit.bodies.refusals import USER, parse_response, refusal


class Door(NamedTuple):
    parse: Callable[[bytes], Any]
    kind: type[Fields]
    needs: dict[str, Any]
    neutral: dict[str, tuple[Any, ...]] = NEUTRAL
    has_params: bool = False
    """Whether the fields are meant that are in its `sampling_params`."""

    def parsed(self, **fields: Any) -> Any:
        if self.has_params:
            fields = {"sampling_params": fields}
        return self.parse(json.dumps({**self.needs, **fields}).encode())


def generate(body: bytes) -> CompletionRequest:
    return parse_generate(body).request


CHAT = {"messages": [USER]}
IDS = {"token_ids": [1, 2]}
DOORS = {
    "completions": Door(parse_completion, CompletionRequest, {"prompt": "x"}),
    "chats": Door(parse_chat, ChatRequest, CHAT),
    "several chats": Door(parse_chats, ChatsRequest, {"messages": [[USER], [USER]]}),
    "responses": Door(parse_response, ResponseRequest, {"input": "x"}, RESPONSE_NEUTRAL),
    "messages": Door(parse_message, MessageRequest, {**CHAT, "max_tokens": 9}, MESSAGE_NEUTRAL),
    "count": Door(parse_count, CountRequest, CHAT, MESSAGE_NEUTRAL),
    "tokens": Door(parse_tokens, TokensRequest, IDS, TOKENS_NEUTRAL),
    "tokens' sampling": Door(parse_tokens, TokensRequest, IDS, TOKENS_NEUTRAL, True),
    "generate": Door(generate, GenerateRequest, {"text": "x"}, GENERATE_NEUTRAL),
    "generate's sampling": Door(generate, GenerateRequest, {"text": "x"}, GENERATE_NEUTRAL, True),
    "tokenize": Door(parse_tokenize, TokenizeRequest, {"prompt": "x"}),
    "tokenize a chat": Door(parse_tokenize, TokenizeRequest, CHAT),
    "detokenize": Door(parse_detokenize, DetokenizeRequest, {"tokens": [1]}),
}
EVERYWHERE = {
    (name, json.dumps(value))
    for door in DOORS.values()
    for name, value in defaults_of(door.kind).items()
    if name not in ("max_tokens", "add_special_tokens")  # whose defaults differ
} | {(name, json.dumps(value)) for name, values in NEUTRAL.items() for value in (*values, None)}
EVERYWHERE |= {
    (name, json.dumps(value))
    for name, value in {
        "return_routed_experts": False,
        "context_management": {"edits": []},
        "typical_p": 1,
        "no_repeat_ngram_size": 0,
        "xtc_probability": 0,
        "mirostat": 0,
        "cache_prompt": True,
        "vllm_xargs": {},
        "reasoning": {"effort": None, "summary": None},
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "store": True,
        "stream_options": {"include_obfuscation": True},
    }.items()
}
"""What asks for nothing: every default of every route, and what is as good as one."""
NOT_HERE = {
    (door, "stream_options", json.dumps(value))  # without a stream
    for door in ("completions", "chats", "several chats")
    for value in NEUTRAL["stream_options"]
    if value.get("include_usage")
}
"""What asks for something at one of them."""


@pytest.mark.parametrize("name", DOORS)
def test_takes_what_asks_for_nothing_at_every_route(name: str) -> None:
    door = DOORS[name]
    plain, own = door.parsed(), hints_of(CompletionRequest if door.has_params else door.kind)
    for field, text in sorted(EVERYWHERE):
        if (name, field, text) in NOT_HERE or field in (*door.needs, "text", "input_ids"):
            continue
        try:
            result = door.parsed(**{field: json.loads(text)})
        except InvalidRequest as error:
            raise AssertionError(f"{field} = {text} at {name}") from error
        assert result == plain or field in own, f"{field} = {text} at {name}"


@pytest.mark.parametrize("name", ["completions", "chats", "messages", "count", "responses"])
@pytest.mark.parametrize("field", ["user", "safety_identifier", "prompt_cache_key"])
def test_takes_names_of_users_and_prompts(name: str, field: str) -> None:
    DOORS[name].parsed(**{field: "anything"})


@pytest.mark.parametrize("name", ["messages", "count"])
def test_messages_take_the_neutral_values_of_chats(name: str) -> None:
    tools = [{"name": "f", "input_schema": {"type": "object"}}]
    none = {"tools": tools, "tool_choice": {"type": "none"}}
    assert DOORS[name].parsed(tools=tools, tool_choice="none") == DOORS[name].parsed(**none)
    turns = [USER, {"role": "assistant", "content": "a"}]
    error = refusal(DOORS[name].parsed, messages=turns, continue_final_message=False)
    assert error.param == "continue_final_message"


@pytest.mark.parametrize("name", DOORS)
def test_refuses_by_name_what_asks_for_something(name: str) -> None:
    door = DOORS[name]
    own = hints_of(CompletionRequest if door.has_params else door.kind)
    theirs = {"no_stop_trim"} if name == "generate's sampling" else set()  # it means another field
    for field in door.neutral.keys() - own.keys() - door.needs.keys() - theirs:
        for asked in ("asked for", True, 7, 7.5, ["x"], {"x": 1}):
            if asked in door.neutral[field]:
                continue
            error = refusal(door.parsed, **{field: asked})
            assert error.param == field and error.message.startswith(f"{field} = ")
            assert "is not supported" in error.message


def test_nulls_within_an_object_are_absent() -> None:
    for name, fields in (
        ("completions", {"stream": True, "stream_options": {"include_usage": None}}),
        ("completions", {"until": {"match": "a", "count": None, "score": None}}),
        ("responses", {"text": {"format": None, "verbosity": None}}),
        ("responses", {"reasoning": {"effort": None, "summary": None}}),
        ("messages", {"tool_choice": {"type": "auto", "disable_parallel_tool_use": None}}),
        ("messages", {"output_config": {"format": None}}),
    ):
        without = {
            field: {n: v for n, v in value.items() if v is not None}
            if isinstance(value, dict)
            else value
            for field, value in fields.items()
        }
        assert DOORS[name].parsed(**fields) == DOORS[name].parsed(**without)
    assert refusal(DOORS["completions"].parsed, logit_bias={"5": None}).param == "logit_bias"
