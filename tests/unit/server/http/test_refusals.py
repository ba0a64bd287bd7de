"""What refused requests are told, and by which words other people's clients know it.

Nothing here reaches an engine: there is none.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from engine.client.client import EngineClient
from engine.errors import InvalidRequest
from engine.messages import MAX_TEMPERATURE, Request, SamplingParams
from engine.scheduler.accept import accept
from server.batch.lines import BatchLine, answer_line, parse_line
from server.config import ServerConfig
from server.generation.request_owner import RequestOwner
from server.routes.app import create_app
from server.routes.services import answering
from server.schema.chat_request import CHAT_NEUTRAL, parse_chat
from server.schema.completion_request import parse_completion
from server.storage.records import LineError
from server.text.chat_template import ChatTemplate
from server.text.text import Text
from tests.serving import CHAT_TEMPLATE, TEXT_MODEL

USER = {"role": "user", "content": "hi"}
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
TOO_LONG = {
    COMPLETIONS: {"prompt": "a b c d " * 100},
    CHATS: {"messages": [{"role": "user", "content": "a b c d " * 100}]},
}


@pytest.fixture
async def http(text_model: Path) -> AsyncIterator[httpx.AsyncClient]:
    template = ChatTemplate(CHAT_TEMPLATE, {})
    app = create_app(ServerConfig(), EngineClient("tcp://127.0.0.1:1"), Text(text_model), template)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        yield client
    template.close()


def check_overflow(message: str) -> None:
    """LiteLLM looks for the words of the beginning, LangChain for those of the end."""
    assert re.fullmatch(
        r"This model's maximum context length is 128 tokens\. However, your prompt has (at least )?"
        r"\d+ tokens: the prompt is too long\.",
        message,
    )


@pytest.mark.parametrize("path", TOO_LONG)
@pytest.mark.parametrize("repeats", [1, 1_000])
async def test_clients_know_a_context_overflow_by_its_words(
    http: httpx.AsyncClient, path: str, repeats: int
) -> None:
    body = json.dumps(TOO_LONG[path]).replace("a b c d ", "a b c d " * repeats)
    reply = await http.post(path, content=body)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["code"] == "context_length_exceeded"
    check_overflow(error["message"])


@pytest.mark.parametrize("url", TOO_LONG)
async def test_a_line_of_a_batch_says_a_context_overflow_in_the_same_words(
    text_model: Path, url: str
) -> None:
    line = BatchLine(1, "a", "POST", url, json.dumps(TOO_LONG[url]).encode(), 1)
    client = EngineClient("tcp://127.0.0.1:1")
    with answering(client, Text(text_model), text_model) as (completions, chat):
        answerers: dict[str, Any] = {COMPLETIONS: completions, CHATS: chat}
        result = await answer_line(line, answerers, RequestOwner(), "batch_ab")
    check_overflow(json.loads(result.record)["response"]["body"]["error"]["message"])


async def test_a_line_of_a_batch_goes_ahead_of_no_other_batch(text_model: Path) -> None:
    line = BatchLine(1, "a", "POST", COMPLETIONS, b'{"prompt": "a", "priority": -9}', 1)
    client = EngineClient("tcp://127.0.0.1:1")
    with answering(client, Text(text_model), text_model) as (completions, _chat):
        result = await answer_line(
            line, {COMPLETIONS: completions}, RequestOwner(durable=True), "b"
        )
    error = json.loads(result.record)["response"]["body"]["error"]
    assert error["param"] == "priority" and "priority = -9: lines have" in error["message"]


def error_of(reply: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert reply.status_code == status
    error: dict[str, Any] = reply.json()["error"]
    return error


@pytest.mark.parametrize(
    ("path", "body", "param", "named"),
    [
        (COMPLETIONS, {"messages": [USER]}, "messages", CHATS),
        (COMPLETIONS, {"messages": [USER], "prompt": "a"}, "messages", CHATS),
        (CHATS, {"prompt": "a"}, "prompt", COMPLETIONS),
        (COMPLETIONS, {"promt": "a"}, "promt", "did you mean 'prompt'?"),
        (COMPLETIONS, {"prompt": "a", "max_token": 5}, "max_token", "did you mean 'max_tokens'?"),
        (COMPLETIONS, {"prompt": "a", "maxTokens": 5}, "maxTokens", "did you mean 'max_tokens'?"),
        (CHATS, {"messages": [USER], "temprature": 1}, "temprature", "'temperature'?"),
        (CHATS, {"messages": [USER], "tool": []}, "tool", "'tools'?"),
        (CHATS, {"messages": [USER], "tool_choice": "required", "tools": [{}]}, "tools", "tools ="),
        ("/tokenize", {"promt": "a"}, "promt", "did you mean 'prompt'?"),
        ("/tokenize", {"prompt": "a", "x" * 10**5: 1}, "x" * 10**5, "xx' is not a field"),
    ],
)
async def test_a_refused_field_names_the_one_that_was_meant(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], param: str, named: str
) -> None:
    error = error_of(await http.post(path, json=body))
    assert error["param"] == param
    assert named in error["message"] and len(error["message"]) < 300


async def test_a_field_like_no_other_gets_no_guess(http: httpx.AsyncClient) -> None:
    error = error_of(await http.post(COMPLETIONS, json={"prompt": "a", "zzz": 1}))
    assert error["message"] == "'zzz' is not a field of this request"


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/completions", COMPLETIONS),
        ("/v1/v1/completions", COMPLETIONS),
        ("/chat/completions", CHATS),
        ("/api/v1/chat/completions", CHATS),
        ("/v1/health", "/health"),
        ("/models/tiny", "/v1/models/tiny"),
        ("/v1/embeddings", None),
        ("/a" * 10_000, None),
    ],
)
async def test_an_unknown_path_names_the_one_that_was_meant(
    http: httpx.AsyncClient, path: str, meant: str | None
) -> None:
    error = error_of(await http.post(f"http://127.0.0.1{path}"), 404)
    if meant:
        assert error["message"].endswith(f"; did you mean {meant}?")
    else:
        assert "did you mean" not in error["message"]


@pytest.mark.parametrize("before", [b"", b'"user": "abc", '])
async def test_a_byte_that_is_no_utf8_is_told_by_its_place_in_the_body(
    http: httpx.AsyncClient, before: bytes
) -> None:
    body = b"{" + before + b'"prompt": "ab\xff"}'
    error = error_of(await http.post(COMPLETIONS, content=body))
    assert f"byte 0xff in position {body.index(0xFF)}" in error["message"]
    line = body.replace(b"prompt", b"custom_id").replace(b"user", b"url")
    told = parse_line(line, 1)
    assert isinstance(told, LineError) and f"position {line.index(0xFF)}" in told.message


ROUTER = {
    "no_stop_trim": False,
    "ignore_eos": False,
    "skip_special_tokens": True,
    "return_hidden_states": False,
    "echo": False,
    "stream": False,
}
"""What sglang-router 0.3.2 adds to completions."""
CHAT_ROUTER = {
    "logprobs": False,
    "separate_reasoning": True,
    "stream_reasoning": True,
    "include_reasoning": True,
    "continue_final_message": False,
}
"""And to chats, vllm-router 0.1.17 among them."""


def test_requests_that_a_router_has_passed_on_are_the_same_requests() -> None:
    plain = {"prompt": "a"}
    assert parse_completion(encode({**plain, **ROUTER})) == parse_completion(encode(plain))
    chat = {"messages": [USER]}
    assert parse_chat(encode({**chat, **ROUTER, **CHAT_ROUTER})) == parse_chat(encode(chat))


def encode(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()


@pytest.mark.parametrize(("name", "values"), CHAT_NEUTRAL.items())
def test_a_neutral_field_is_refused_at_any_other_value(name: str, values: tuple[Any, ...]) -> None:
    for value in values:
        parse_chat(encode({"messages": [USER], name: value}))
    for other in (True, 7, "asked for", ["x"], {"x": 1}):
        if other not in values:
            with pytest.raises(InvalidRequest, match=f"^{name} = .* is not supported") as refused:
                parse_chat(encode({"messages": [USER], name: other}))
            assert refused.value.param == name


@pytest.mark.parametrize("temperature", [0, 1e-9, MAX_TEMPERATURE])
def test_one_limit_of_temperatures_holds_everywhere(temperature: float) -> None:
    model, above = TEXT_MODEL, np.nextafter(MAX_TEMPERATURE, np.inf)
    prompt = np.array([5], "<i4").tobytes()
    assert parse_completion(encode({"prompt": "a", "temperature": temperature}))
    accept(Request("a", prompt, SamplingParams(temperature=temperature)), model, 0)
    with pytest.raises(InvalidRequest, match=r"temperature must be .* 100"):
        parse_completion(encode({"prompt": "a", "temperature": above}))
    with pytest.raises(InvalidRequest, match=r"temperature must be .* 100"):
        accept(Request("a", prompt, SamplingParams(temperature=above)), model, 0)
