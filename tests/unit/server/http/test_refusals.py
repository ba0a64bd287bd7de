"""What refused requests are told, and by which words other people's clients know it.

Nothing here reaches an engine: there is none.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from srm import errors
from srm.engine.client.client import EngineClient
from srm.engine.messages import MAX_TEMPERATURE
from srm.engine.scheduler.accept import accept
from srm.server.batch.lines import BatchLine, answer_line, parse_line
from srm.server.errors import BodyTooSlow, RateLimited, srm_error
from srm.server.generation.engine_request import RequestOwner
from srm.server.routes.services import answering
from srm.server.storage.records import LineError
from srm.server.text.chat_template import ChatTemplate
from srm.server.text.text import Text
from tests.kit.bodies.refusals import USER, chat, completion, refusal
from tests.kit.bodies.refused import (
    GENERATE,
    MEANT,
    MESSAGES,
    REFUSED,
    RENDER,
    RESPONSES,
    TOKENS,
    body_of,
    turn,
)
from tests.kit.engines.making import request_of
from tests.kit.serving import CHAT_TEMPLATE, CHATS, COMPLETIONS, TEXT_MODEL, error_of
from tests.unit.server.conftest import Served

LONG = "a b c d " * 100
TOO_LONG: dict[str, Any] = {
    COMPLETIONS: {"prompt": LONG},
    CHATS: {"messages": [turn(LONG)]},
    RESPONSES: {"input": LONG},
    MESSAGES: {"messages": [turn(LONG)], "max_tokens": 1},
    TOKENS: {"token_ids": [5] * 400},
    GENERATE: {"text": LONG},
    RENDER: {"prompt": LONG},
}
OF_BATCHES = (COMPLETIONS, CHATS, RESPONSES)
HERE = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
"""What SGLang's names are here, which its clients are not told."""
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


Answer = Callable[..., Awaitable[Any]]


@pytest.fixture
def line(text: Text, text_model: Path) -> Iterator[Answer]:
    """line(path, body, durable=True): the error of a line of a batch with this body."""
    with answering(EngineClient("tcp://127.0.0.1:1"), text, text_model) as endpoints:
        answerers: dict[str, Any] = dict(zip(OF_BATCHES, endpoints, strict=True))

        async def answer(path: str, body: Any, durable: bool = False) -> Any:
            given = {"custom_id": "a", "method": "POST", "url": path, "body": body}
            read = parse_line(json.dumps(given).encode(), 1)
            assert isinstance(read, BatchLine)
            result = await answer_line(read, answerers, RequestOwner(durable=durable), "batch_ab")
            return json.loads(result.record)["response"]["body"]["error"]

        yield answer


@pytest.mark.parametrize("path", sorted({path for path, *_ in REFUSED}))
async def test_a_refusal_names_the_field(http: httpx.AsyncClient, line: Answer, path: str) -> None:
    """In the same words to who asks over HTTP and in a line of a batch."""
    for row in REFUSED:
        door, fields, param, words = row
        if door != path:
            continue
        body, shown = body_of(path, fields), str(fields)[:200]
        error = error_of(await http.post(path, content=json.dumps(body)))
        assert (error["param"], error["code"]) == (param, "invalid_request"), (shown, error)
        assert words in error["message"], (shown, error)
        if row in MEANT:
            assert ("did you mean" in error["message"]) == words.endswith("?")
            assert len(error["message"]) < 300
        assert HERE.get(param, "…") not in error["message"] or path != GENERATE
        if path in OF_BATCHES and "stream" not in fields:
            assert await line(path, body) == error, shown


@pytest.mark.parametrize("path", TOO_LONG)
async def test_says_overflow_in_known_words(
    http: httpx.AsyncClient, line: Answer, path: str
) -> None:
    for repeats in (1, 1_000):
        content = json.dumps(TOO_LONG[path]).replace(LONG, LONG * repeats)
        error = error_of(await http.post(path, content=content))
        assert error["code"] == "context_length_exceeded"
        assert error["param"] == next(iter(TOO_LONG[path]))
        assert OVERFLOW.fullmatch(error["message"])
    if path in OF_BATCHES:
        assert OVERFLOW.fullmatch((await line(path, TOO_LONG[path]))["message"])


async def test_a_line_goes_ahead_of_no_other_batch(line: Answer) -> None:
    error = await line(COMPLETIONS, {"prompt": "a", "priority": -9}, durable=True)
    assert error["param"] == "priority" and "priority = -9: lines have" in error["message"]


HINTS: list[dict[str, Any]] = [
    {"reasoning_effort": "none"},
    {"verbosity": "medium"},
    {"prompt_cache_retention": "24h"},
    {"stream": True, "stream_options": {"include_obfuscation": False}},
    {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"},
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


async def test_an_unknown_path_names_a_known_one(http: httpx.AsyncClient) -> None:
    for path, meant in PATHS.items():
        message = error_of(await http.post(path), 404)["message"]
        ending = f"; did you mean {meant}?"
        assert message.endswith(ending) if meant else "did you mean" not in message


@pytest.mark.parametrize("fields", HINTS, ids=lambda fields: next(iter(fields)))
def test_hints_that_ask_for_nothing_are_taken(fields: dict[str, Any]) -> None:
    assert chat(**fields).messages


async def test_names_the_place_of_a_byte_that_is_no_utf8(http: httpx.AsyncClient) -> None:
    for before in (b"", b'"user": "abc", '):
        body = b"{" + before + b'"prompt": "ab\xff"}'
        error = error_of(await http.post(COMPLETIONS, content=body))
        assert f"byte 0xff in position {body.index(0xFF)}" in error["message"]
        given = body.replace(b"prompt", b"custom_id").replace(b"user", b"url")
        reported = parse_line(given, 1)
        assert isinstance(reported, LineError)
        assert f"position {given.index(0xFF)}" in reported.message


FORMS = ("text/plain", "text/plain;charset=UTF-8", "Multipart/Form-Data; boundary=b",
         "application/x-www-form-urlencoded")  # fmt: skip


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


def every_error(kind: type[errors.SRMError] = errors.SRMError) -> Iterator[type[errors.SRMError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from every_error(child)


RETRIED = {BodyTooSlow, errors.IdInUse, RateLimited, errors.SwapInProgress}
"""Of the caller's: another time they may not occur."""


@pytest.mark.parametrize("kind", list(every_error()))
def test_every_error_has_an_openai_shape(kind: type[errors.SRMError]) -> None:
    error = errors.Overloaded("full", 3) if kind is errors.Overloaded else kind("what happened")
    reply = srm_error(error)
    detail = json.loads(bytes(reply.body))["error"]
    assert set(detail) == {"message", "type", "param", "code"}
    assert detail["message"] == error.message
    assert detail["code"] == kind.code
    is_callers = issubclass(kind, errors.RequestError) and kind is not errors.Overloaded
    assert (400 <= reply.status_code < 500) == is_callers
    is_final = kind in {errors.TimedOut, errors.StoreFull} or (is_callers and kind not in RETRIED)
    assert (reply.headers.get("x-should-retry") == "false") == is_final
    assert (reply.status_code in {429, 503}) == ("retry-after" in reply.headers)
