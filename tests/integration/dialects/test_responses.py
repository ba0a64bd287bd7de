"""Responses over HTTP: chats in the form of OpenAI's newer clients, as its SDK reads them."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.integration.dialects.test_chats import MESSAGES, ask
from tests.kit.serving import Server

PATH = "/v1/responses"
ASKED: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_output_tokens": 12}


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_a_response_is_the_chat_that_it_stands_for(server: Server, client: openai.OpenAI) -> None:
    chat = ask(server, temperature=0, max_tokens=12, logprobs=True, top_logprobs=2)
    system, question = MESSAGES
    response = client.responses.create(
        instructions=system["content"],
        input=question["content"],
        include=["message.output_text.logprobs"],
        top_logprobs=2,
        **ASKED,
    )
    (choice,) = chat["choices"]
    assert response.output_text == choice["message"]["content"]
    shown = response.to_dict()["output"][0]["content"][0]["logprobs"]
    scores = [{**score, "bytes": score["bytes"] or []} for score in choice["logprobs"]["content"]]
    assert [score["logprob"] for score in shown] == [score["logprob"] for score in scores]
    assert [score["bytes"] for score in shown] == [score["bytes"] for score in scores]
    assert response.usage is not None and response.id.startswith("resp_")
    assert response.usage.total_tokens == chat["usage"]["total_tokens"]
    is_cut = choice["finish_reason"] == "length"
    assert response.status == ("incomplete" if is_cut else "completed")


def test_items_become_messages(server: Server, client: openai.OpenAI) -> None:
    first = client.responses.create(input="the cat", **ASKED)
    items: list[Any] = [
        {"role": "developer", "content": [{"type": "input_text", "text": "sat"}]},
        {"role": "user", "content": "the cat"},
        *first.output,
        *({"role": "user", "content": "on"}, {"type": "message", "role": "user", "content": "it"}),
    ]
    response = client.responses.create(input=items, **ASKED)
    messages = [
        *({"role": "system", "content": "sat"}, {"role": "user", "content": "the cat"}),
        {"role": "assistant", "content": first.output_text},
        *({"role": "user", "content": "on"}, {"role": "user", "content": "it"}),
    ]
    chat = ask(server, messages=messages, temperature=0, max_tokens=12)
    assert response.output_text == chat["choices"][0]["message"]["content"]


def test_the_sdk_adds_a_stream_up_to_the_response(client: openai.OpenAI) -> None:
    asked = {**ASKED, "max_output_tokens": 200, "seed": 3, "stop": ["t"], "temperature": 1}
    extra = {name: asked.pop(name) for name in ("seed", "stop")}
    expected = client.responses.create(input="the cat", extra_body=extra, **asked)
    with client.responses.stream(input="the cat", extra_body=extra, **asked) as stream:
        for event in stream:
            if event.type == "response.output_text.delta":
                snapshot = event.snapshot
        response = stream.get_final_response()
    assert response.output_text == expected.output_text == snapshot
    assert response.status == expected.status == "completed"
    assert response.usage is not None and expected.usage is not None
    assert response.usage.output_tokens == expected.usage.output_tokens


def test_what_asks_for_nothing_is_accepted(server: Server) -> None:
    fields = {
        **{"store": False, "background": False, "previous_response_id": None},
        "metadata": {"a": "b"},
        **{"truncation": "disabled", "service_tier": "auto", "reasoning": {"effort": None}},
        **{"include": ["reasoning.encrypted_content"], "tools": [], "tool_choice": "auto"},
        "text": {"format": {"type": "text"}},
    }
    reply = server.http.post(PATH, json={"input": "x", "max_output_tokens": 2, **fields})
    assert reply.status_code == 200, reply.text
    assert reply.json()["metadata"] == {"a": "b"}


ROUTER = {
    **{"store": True, "stream": None, "background": False, "priority": 0, "top_k": -1},
    **{"min_p": 0.0, "repetition_penalty": 1.0, "frequency_penalty": 0.0, "stop": None},
    **{"truncation": "disabled", "service_tier": "auto", "tool_choice": "auto", "tools": []},
    **{"parallel_tool_calls": True, "top_logprobs": 0, "reasoning": None, "text": None},
}
"""What sglang-router 0.3.2 makes of a body without them."""


def test_takes_responses_that_come_through_a_router(server: Server) -> None:
    body = {"input": "x", "max_output_tokens": 2, "temperature": 0}
    hints = {"reasoning": {"effort": "low", "summary": "auto"}, "chat_template_kwargs": {"a": 1}}
    for more in (ROUTER, {**ROUTER, **hints}):
        reply = server.http.post(PATH, json={**body, **more})
        assert reply.status_code == 200, reply.text
        assert reply.json()["store"] is True  # which such a router asks for
        assert reply.json()["output"][0]["content"] == plain_content(server, body)
    assert reply.json()["reasoning"] == {"effort": "low", "summary": None}
    stream = {**body, "stream": True, "stream_options": {"include_obfuscation": True}}
    assert "response.incomplete" in server.http.post(PATH, json=stream).text


def plain_content(server: Server, body: dict[str, Any]) -> Any:
    return server.http.post(PATH, json=body).json()["output"][0]["content"]
