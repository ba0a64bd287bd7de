"""Calls of tools over HTTP: any model makes them, whole or in pieces, and reads what came of them.

What a reply looks like in each of its events, tests/unit/server/reply/test_tools.py says.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from tests.kit.serving import CHATS, Server, events_of, joined, parts_of

USER = {"role": "user", "content": "sat"}


def tool(name: str, *values: Any) -> dict[str, Any]:
    parameters = {"properties": {"x": {"enum": [*values]}}, "required": ["x"]}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


NOW = {"type": "function", "function": {"name": "now"}}
TOOLS = [tool("f", 1, 22), tool("g", "}", '"\\'), NOW]
VALUES: dict[str, list[Any]] = {
    "f": [{"x": 1}, {"x": 22}],
    "g": [{"x": "}"}, {"x": '"\\'}],
    "now": [{}],
}
NAMED = {"type": "function", "function": {"name": "g"}}
CASES: list[tuple[dict[str, Any], str]] = [
    ({"tool_choice": NAMED}, "stop"),
    ({"tools": TOOLS[:1], "tool_choice": "required"}, "tool_calls"),
    ({"tools": [NOW], "tool_choice": "required"}, "tool_calls"),
    ({"tool_choice": "required"}, "tool_calls"),
    ({"tool_choice": "required", "parallel_tool_calls": False, "temperature": 0}, "tool_calls"),
    ({"tool_choice": "required", "parallel_tool_calls": True}, "tool_calls"),
]


def ask(server: Server, **fields: Any) -> dict[str, Any]:
    body = {"messages": [USER], "tools": TOOLS, "seed": 3, **fields}
    reply = server.http.post(CHATS, json=body)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


@pytest.mark.parametrize(("fields", "reason"), CASES)
def test_calls_meet_their_schemas(server: Server, fields: dict[str, Any], reason: str) -> None:
    choices = ask(server, n=20, **fields)["choices"]
    names = set()
    for choice in choices:
        calls = choice["message"].get("tool_calls", [])
        assert choice["message"]["content"] is None
        assert choice["finish_reason"] in (reason, "length")
        for call in calls[: None if choice["finish_reason"] == reason else -1]:
            function = call["function"]
            assert json.loads(function["arguments"]) in VALUES[function["name"]]
            names.add(function["name"])
        assert len(calls) == 1 or fields.get("parallel_tool_calls")
    given = {own["function"]["name"] for own in fields.get("tools", TOOLS)}
    assert names <= given
    assert names == {"g"} or fields["tool_choice"] == "required"
    assert any(choice["finish_reason"] == reason for choice in choices)


@pytest.mark.parametrize("more", [{}, {"n": 3, "logprobs": True}, {"n": 20, "stop": "}}"}])
@pytest.mark.parametrize(("fields", "reason"), CASES)
def test_the_pieces_of_a_stream_are_the_whole_reply(
    server: Server, fields: dict[str, Any], reason: str, more: dict[str, Any]
) -> None:
    del reason
    body = {"messages": [USER], "tools": TOOLS, "seed": 3, "request_id": "same", **fields, **more}
    whole = ask(server, **body)
    events = events_of(server, CHATS, **body)
    for choice in whole["choices"]:
        parts = parts_of(events, choice["index"])
        calls: list[dict[str, Any]] = []
        for part in parts:
            for own in part["delta"].pop("tool_calls", []):
                if "id" in own:
                    calls.append({name: own[name] for name in ("id", "function", "type")})
                else:
                    arguments = own["function"]["arguments"]
                    calls[own["index"]]["function"]["arguments"] += arguments
        assert calls == choice["message"].pop("tool_calls", [])
        del choice["message"]["refusal"], choice["token_ids"]
        assert joined(parts) == {
            **{name: value for name, value in choice.items() if name != "message"},
            "delta": choice["message"],
        }


def test_an_answer_follows_what_a_tool_returned(server: Server) -> None:
    first = ask(server, tool_choice="required")["choices"][0]["message"]
    [call] = first["tool_calls"]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "7"}
    fields = {"tools": None, "max_tokens": 3, "temperature": 0, "return_token_ids": True}
    second = ask(server, messages=[USER, first, result], **fields)
    written = f'{{"name":"{call["function"]["name"]}","arguments":{call["function"]["arguments"]}}}'
    texts = [
        {"role": "assistant", "content": written},
        {"role": "user", "content": f"Result of {call['function']['name']}: 7"},
    ]
    assert second["choices"] == ask(server, messages=[USER, *texts], **fields)["choices"]
    assert second["choices"][0]["message"]["content"]


def test_calls_may_be_counted_and_enough_of_them_end_a_request(server: Server) -> None:
    fields = {"tools": TOOLS[:1], "tool_choice": "required", "n": 40}
    reply = ask(server, **fields, until={"match": '"x":22'}, **{"return": "counts"})
    [samples] = reply["samples"]
    assert {entry["text"] for entry in samples["counts"]} == {'{"x":1}', '{"x":22}'}
    assert 0 < samples["matched"] < 40
    choices = ask(server, **fields, until={"match": '"x":22', "count": 2})["choices"]
    calls = [choice["message"]["tool_calls"] for choice in choices if choice["matched"]]
    assert [own["function"]["arguments"] for [own] in calls] == ['{"x":22}'] * 2


ODD: list[tuple[Any, str]] = [
    ({"type": "boolean", "not": {"const": 1}}, "/properties/x/not"),
    ({"type": "array", "items": {"enum": [1]}, "uniqueItems": True}, "/properties/x/unique"),
    ({"enum": [1, 2], "if": {}, "then": {}}, "/properties/x/if, {}/properties/x/then"),
    ({"const": 1, "nullable": True, "é": 1}, "/properties/x/nullable, {}/properties/x/%C3%A9"),
    ({"const": "a", "pattern": "(?i)a"}, "/properties/x/pattern"),
    ({"type": "null", "contains": {}}, "/properties/x/contains"),
    ({"const": 1, "items": [3]}, "/properties/x/items/0"),
    ({"type": "boolean", "$ref": "#/nowhere"}, "/properties/x/$ref"),
    ({"oneOf": [{"const": 1}, {"const": 1}]}, "/properties/x/oneOf"),
    ({"type": "boolean", "format": "int32"}, "/properties/x/format"),
    ({"type": "object", "patternProperties": {"a": {}, "b": {}}, "maxProperties": 0},
     "/properties/x/patternProperties, {}/properties/x/maxProperties"),
]  # fmt: skip


@pytest.mark.parametrize(("own", "places"), ODD)
def test_names_what_a_lenient_schema_cannot_hold(server: Server, own: Any, places: str) -> None:
    schema = {"type": "object", "properties": {"x": own}, "required": ["x"]}
    tools = [NOW, {"type": "function", "function": {"name": "f", "parameters": schema}}]
    named = {"type": "function", "function": {"name": "f"}}
    body = {"messages": [USER], "tools": tools, "max_completion_tokens": 60}
    for choice in ("required", named):
        reply = server.http.post(CHATS, json=body | {"tool_choice": choice})
        assert reply.status_code == 200, reply.text
        shown = reply.headers["x-srm-not-enforced"]
        assert shown.startswith("f" + places.format("f"))
    (call,) = reply.json()["choices"][0]["message"]["tool_calls"]
    assert list(json.loads(call["function"]["arguments"])) == ["x"]
    for strict, status in ((False, 200), (None, 400), (True, 400)):
        named_schema = {"name": "s", "schema": schema, "strict": strict}
        form = {"type": "json_schema", "json_schema": named_schema}
        asked = {"messages": [USER], "response_format": form, "max_completion_tokens": 60}
        reply = server.http.post(CHATS, json=asked)
        assert reply.status_code == status, reply.text
        assert ("x-srm-not-enforced" in reply.headers) == (status == 200)


PERSON = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
RECURSIVE = {
    "$defs": {"n": {"properties": {"next": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}}}},
    "type": "object",
    "properties": {"first": {"$ref": "#/$defs/n"}},
}


@pytest.mark.parametrize("max_tokens", [8, 9, 20, 60])
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        PERSON,
        PERSON | {"additionalProperties": True},
        PERSON | {"patternProperties": {"^b": {"type": "array"}}},
        {"type": "array", "items": {"type": "object", "required": ["a"]}},
        RECURSIVE,
        True,
    ],
)
def test_constrained_json_is_whole(server: Server, schema: Any, max_tokens: int) -> None:
    body = {"prompt": "sat", "n": 8, "max_tokens": max_tokens, "seed": 1}
    outputs = {"json": schema}
    reply = server.http.post("/v1/completions", json=body | {"structured_outputs": outputs})
    assert reply.status_code == 200, reply.text
    judge = Draft202012Validator(schema)
    for choice in reply.json()["choices"]:
        judge.validate(json.loads(choice["text"]))


def test_a_call_among_several_is_whole_where_it_fits(server: Server) -> None:
    tools = [tool("f", 1), {"type": "function", "function": {"name": "g", "parameters": PERSON}}]
    for parallel in (False, True):
        fields = {"parallel_tool_calls": parallel, "max_completion_tokens": 60}
        for made in ask(server, n=10, tools=tools, tool_choice="required", **fields)["choices"]:
            calls = made["message"]["tool_calls"]
            assert calls and all(json.loads(call["function"]["arguments"]) for call in calls)
