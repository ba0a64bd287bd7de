"""Messages over HTTP: chats in the form of Anthropic's clients."""

from __future__ import annotations

import json
from typing import Any

from tests.integration.dialects.test_chats import MESSAGES, ask
from tests.kit.serving import MAX_BODY_BYTES, Server

PATH = "/v1/messages"
SYSTEM, QUESTION = (message["content"] for message in MESSAGES)
USER = {"role": "user", "content": QUESTION}
TOOL = {"name": "f", "input_schema": {"properties": {"x": {"enum": [1, 22]}}, "required": ["x"]}}
ANY = {"tool_choice": {"type": "any"}}


def send(server: Server, path: str = PATH, **fields: Any) -> Any:
    body = {"messages": [USER], "max_tokens": 12, "temperature": 0, **fields}
    return server.http.post(path, json={k: v for k, v in body.items() if v is not None})


def answer(server: Server, **fields: Any) -> Any:
    reply = send(server, **fields)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_a_message_is_the_chat_that_it_stands_for(server: Server) -> None:
    chat = ask(server, temperature=0, max_tokens=12)
    for system in (SYSTEM, [{"type": "text", "text": SYSTEM, "cache_control": None}]):
        message = answer(server, system=system)
        (block,) = message["content"]
        assert block == {"type": "text", "text": chat["choices"][0]["message"]["content"]}
    usage = message["usage"]
    assert usage["output_tokens"] == chat["usage"]["completion_tokens"]
    num_tokens = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert num_tokens == chat["usage"]["prompt_tokens"]
    fields = {"max_tokens": None, "temperature": None, "system": SYSTEM}
    counted = send(server, f"{PATH}/count_tokens", **fields)
    assert counted.json() == {"input_tokens": num_tokens}


def test_the_assistants_last_turn_is_continued(server: Server) -> None:
    turns = [USER, {"role": "assistant", "content": "sat"}]
    chat = ask(server, messages=turns, continue_final_message=True, temperature=0, max_tokens=12)
    message = answer(server, messages=turns)
    assert message["content"][0]["text"] == chat["choices"][0]["message"]["content"]


def test_what_a_tool_returned_is_read(server: Server) -> None:
    called = answer(server, tools=[TOOL], max_tokens=60, **ANY)
    (call,) = called["content"]
    assert called["stop_reason"] == "tool_use" and call["input"]["x"] in (1, 22)
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "on", "is_error": True}
    turns = [
        USER,
        {"role": "assistant", "content": called["content"]},
        {"role": "user", "content": [result, {"type": "text", "text": "it"}]},
    ]
    function = {"name": "f", "arguments": json.dumps(call["input"], separators=(",", ":"))}
    messages = [
        USER,
        {"role": "assistant", "tool_calls": [{"id": call["id"], "function": function}]},
        {"role": "tool", "tool_call_id": call["id"], "content": "Error: on"},
        {"role": "user", "content": "it"},
    ]
    chat = ask(server, messages=messages, temperature=0, max_tokens=12)
    message = answer(server, messages=turns)
    assert message["content"][0]["text"] == chat["choices"][0]["message"]["content"]


def test_a_schema_is_the_form_of_the_text(server: Server) -> None:
    schema = {"type": "object", "properties": {"a": {"const": 7}}, "required": ["a"]}
    form = {"format": {"type": "json_schema", "schema": schema}}
    message = answer(server, output_config=form, max_tokens=60)
    assert json.loads(message["content"][0]["text"])["a"] == 7


def test_errors_are_anthropics_at_every_status(server: Server) -> None:
    too_large = b" " * (MAX_BODY_BYTES + 1)
    for method, path, content, status in (
        ("POST", PATH, b"{}", 400),
        ("POST", PATH, json.dumps({"model": "x", "messages": [USER], "max_tokens": 1}), 404),
        ("POST", f"{PATH}/batches", b"{}", 404),
        ("GET", PATH, None, 405),
        ("POST", PATH, too_large, 413),
        ("POST", f"{PATH}/count_tokens", b"[]", 400),
    ):
        reply = server.http.request(method, path, content=content)
        assert reply.status_code == status
        assert reply.json()["type"] == "error" and reply.json()["error"]["message"]
