"""What refused requests are told, and by which words other people's clients know it.

Nothing here reaches an engine: there is none.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from srm.engine.client.client import EngineClient
from srm.engine.messages import MAX_TEMPERATURE
from srm.engine.scheduler.accept import accept
from srm.server.batch.lines import BatchLine, answer_line, parse_line
from srm.server.dialects.chat.request import parse_chat
from srm.server.generation.engine_request import RequestOwner
from srm.server.routes.services import answering
from srm.server.storage.records import LineError
from srm.server.text.chat_template import ChatTemplate
from srm.server.text.text import Text
from tests.kit.bodies.refusals import USER, completion, refusal
from tests.kit.engines.making import request_of
from tests.kit.serving import CHAT_TEMPLATE, CHATS, COMPLETIONS, TEXT_MODEL, error_of
from tests.unit.server.conftest import Served

LONG = "a b c d " * 100
TOO_LONG: dict[str, Any] = {
    COMPLETIONS: {"prompt": LONG},
    CHATS: {"messages": [{"role": "user", "content": LONG}]},
}
OVERFLOW = re.compile(
    r"This model's maximum context length is 128 tokens\. However, your prompt has (at least )?"
    r"\d+ tokens: the prompt is too long\."
)
"""LiteLLM looks for the words of the beginning, LangChain for those of the end."""


@pytest.fixture(scope="module")
def template() -> Iterator[ChatTemplate]:
    with closing(ChatTemplate(CHAT_TEMPLATE, {})) as template:
        yield template


@pytest.fixture
async def http(served: Served, template: ChatTemplate) -> AsyncIterator[httpx.AsyncClient]:
    async with served(template=template) as client:
        yield client


async def error_of_line(text: Text, folder: Path, path: str, durable: bool, **fields: Any) -> Any:
    line = BatchLine(1, "a", "POST", path, json.dumps(fields).encode(), 1)
    with answering(EngineClient("tcp://127.0.0.1:1"), text, folder) as (completions, chat, _):
        answerers: dict[str, Any] = {COMPLETIONS: completions, CHATS: chat}
        result = await answer_line(line, answerers, RequestOwner(durable=durable), "batch_ab")
    return json.loads(result.record)["response"]["body"]["error"]


@pytest.mark.parametrize("path", TOO_LONG)
async def test_clients_know_a_context_overflow_by_its_words(
    http: httpx.AsyncClient, path: str, text: Text, text_model: Path
) -> None:
    """In a line of a batch, too."""
    for repeats in (1, 1_000):
        content = json.dumps(TOO_LONG[path]).replace(LONG, LONG * repeats)
        error = error_of(await http.post(path, content=content))
        assert error["code"] == "context_length_exceeded"
        assert OVERFLOW.fullmatch(error["message"])
    error = await error_of_line(text, text_model, path, durable=False, **TOO_LONG[path])
    assert OVERFLOW.fullmatch(error["message"])


async def test_a_line_of_a_batch_goes_ahead_of_no_other_batch(text: Text, text_model: Path) -> None:
    fields = {"prompt": "a", "priority": -9}
    error = await error_of_line(text, text_model, COMPLETIONS, durable=True, **fields)
    assert error["param"] == "priority" and "priority = -9: lines have" in error["message"]


TOOL = {"type": "function", "function": {"name": "f"}}
MEANT: list[tuple[str, dict[str, Any], str, str]] = [
    (COMPLETIONS, {"messages": [USER]}, "messages", CHATS),
    (COMPLETIONS, {"messages": [USER], "prompt": "a"}, "messages", CHATS),
    (CHATS, {"prompt": "a"}, "prompt", COMPLETIONS),
    (COMPLETIONS, {"promt": "a"}, "promt", "did you mean 'prompt'?"),
    (COMPLETIONS, {"prompt": "a", "max_token": 5}, "max_token", "did you mean 'max_tokens'?"),
    (COMPLETIONS, {"prompt": "a", "maxTokens": 5}, "maxTokens", "did you mean 'max_tokens'?"),
    (COMPLETIONS, {"prompt": "a", "zzz": 1}, "zzz", "'zzz' is not a field of this request"),
    (CHATS, {"messages": [USER], "temprature": 1}, "temprature", "'temperature'?"),
    (CHATS, {"messages": [USER], "tool": []}, "tool", "'tools'?"),
    (CHATS, {"messages": [USER], "tool_choice": "required", "tools": [{}]}, "tools", "tools[0] m"),
    (
        CHATS,
        {"messages": [USER], "tool_choice": "any"},
        "tool_choice",
        'tool_choice must be "none", ',
    ),
    *(
        (
            CHATS,
            {"messages": [USER], "required_prefix_token_ids": ids},
            "required_prefix_token_ids",
            way,
        )
        for ids, way in (([1], "has none"), ([], "not empty; got []"), ("AAAA", 'got "AAAA"'))
    ),
    (
        "/tokenize",
        {"prompt": "a", "required_prefix_token_ids": [1]},
        "required_prefix_token_ids",
        "only with messages",
    ),
    ("/tokenize", {"promt": "a"}, "promt", "did you mean 'prompt'?"),
    ("/tokenize", {"prompt": "a", "x" * 10**5: 1}, "x" * 63 + "…", "x…' is not a field"),
]
MEANT += [
    (COMPLETIONS, {"prompt": "a", name: [1]}, name, f"{name!r} is not a field of this request")
    for name in ("prompt_token_ids", "required_prefix_token_ids")
]
MEANT += [
    (
        COMPLETIONS,
        {"prompt": "a", "token_ids_logprob": [1]},
        "token_ids_logprob",
        "logprob_token_ids is its name here",
    ),
    (
        COMPLETIONS,
        {"prompt": "a", "logprobs": -2},
        "logprobs",
        "max_logprobs; -1: the whole vocabulary; got -2",
    ),
]
HINTS: list[dict[str, Any]] = [
    {"reasoning_effort": "none"},
    {"verbosity": "medium"},
    {"prompt_cache_retention": "24h"},
    {"stream": True, "stream_options": {"include_obfuscation": False}},
    {"tools": [TOOL], "tool_choice": "none"},
    {"functions": [{"name": "f"}], "function_call": "none"},
    {"messages": [USER, {"role": "assistant", "content": "b", "tool_calls": []}, USER]},
]
PATHS = {
    "/completions": COMPLETIONS,
    "/v1/v1/completions": COMPLETIONS,
    "/chat/completions": CHATS,
    "/api/v1/chat/completions": CHATS,
    "/v1/health": "/health",
    "/models/tiny": "/v1/models/tiny",
    "/v1/embeddings": None,
    "/a" * 10_000: None,
}


async def test_what_is_not_known_names_what_was_meant(http: httpx.AsyncClient) -> None:
    for path, body, param, named in MEANT:
        error = error_of(await http.post(path, json=body))
        assert error["param"] == param
        assert named in error["message"] and len(error["message"]) < 300
        assert ("did you mean" in error["message"]) == named.endswith("?")
    for path, meant in PATHS.items():
        message = error_of(await http.post(path), 404)["message"]
        assert (
            message.endswith(f"; did you mean {meant}?") if meant else "did you mean" not in message
        )


@pytest.mark.parametrize("fields", HINTS, ids=lambda fields: next(iter(fields)))
def test_hints_that_ask_for_nothing_are_taken(fields: dict[str, Any]) -> None:
    assert parse_chat(json.dumps({"messages": [USER], **fields}).encode()).messages


async def test_a_byte_that_is_no_utf8_is_told_by_its_place_in_the_body(
    http: httpx.AsyncClient,
) -> None:
    for before in (b"", b'"user": "abc", '):
        body = b"{" + before + b'"prompt": "ab\xff"}'
        error = error_of(await http.post(COMPLETIONS, content=body))
        assert f"byte 0xff in position {body.index(0xFF)}" in error["message"]
        line = body.replace(b"prompt", b"custom_id").replace(b"user", b"url")
        reported = parse_line(line, 1)
        assert (
            isinstance(reported, LineError) and f"position {line.index(0xFF)}" in reported.message
        )


FORMS = (
    *("text/plain", "text/plain;charset=UTF-8", "Multipart/Form-Data; boundary=b"),
    "application/x-www-form-urlencoded",
)


async def test_a_forms_content_type_is_no_json(http: httpx.AsyncClient) -> None:
    """Those a page may send to any server, without asking it first."""
    for kind in FORMS:
        reply = await http.post(COMPLETIONS, content=b"{}", headers={"content-type": kind})
        error = error_of(reply, 415)
        assert (error["code"], error["param"]) == ("unsupported_media_type", "content-type")
    for headers in ({"content-type": "application/json; charset=utf-8"}, {}):
        reply = await http.post(COMPLETIONS, content=b"{}", headers=headers)
        assert error_of(reply)["param"] == "prompt"


def test_one_limit_of_temperatures_holds_everywhere() -> None:
    for temperature in (0, 1e-9, MAX_TEMPERATURE):
        assert completion(temperature=temperature)
        accept(request_of(temperature=temperature), TEXT_MODEL, 0)
    above = math.nextafter(MAX_TEMPERATURE, math.inf)
    assert "100" in refusal(completion, temperature=above).message
    error = refusal(accept, request_of(temperature=above), TEXT_MODEL, 0)
    assert re.match(r"temperature must be .* 100", error.message)
