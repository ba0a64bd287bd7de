"""An error says what was sent, and no more of it than a person reads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from srm.engine.client.client import EngineClient
from srm.errors import MAX_MESSAGE, InvalidRequest, StoreError
from srm.server.batch.lines import BatchLine, LineResult, answer_line, parse_line
from srm.server.errors import body_of
from srm.server.generation.engine_request import RequestOwner
from srm.server.routes.services import answering
from srm.server.storage.records import LineError
from srm.server.text.text import Text
from tests.kit.bodies.refusals import USER
from tests.kit.serving import COMPLETIONS, error_of
from tests.unit.server.conftest import Served

LONG = "x\n" * 400_000
"""As JSON it has more than a MiB."""
SHORT = LONG[:500_000]
SHOWN = 1_000
"""Most bytes of an error's reply here."""
CHAT = "/v1/chat/completions"


def bodies(long: str) -> Iterator[tuple[str, dict[str, Any]]]:
    fields: tuple[dict[str, Any], ...] = (
        *({name: long} for name in ("model", "n", "suffix", "request_id", "return")),
        *({long: 1}, {"stop": [long]}, {"bad_words": [long]}, {"prompt": [1, long]}),
        *({"until": {"match": long}}, {"until": {"match": "a", long: 1}}),
        *({"verify": {long: 1}}, {"verify": {"match": long}}, {"verify": {"number": long}}),
        *({"verify": {"any": [long]}}, {"metadata": {long: "a"}}, {"logit_bias": {long: 1}}),
        *({"stream_options": {long: True}}, {"return_packed": True, "stop": ["\0" * 256] * 16}),
    )
    messages: tuple[dict[str, Any], ...] = (
        *({**USER, "role": long}, {**USER, long: "text"}),
        {**USER, "content": [{"type": long, "text": "a"}]},
        {**USER, "content": [{"type": "text", "text": "a", long: "text"}]},
        {**USER, "tool_calls": [{"type": "function", "function": {long: "text"}}]},
    )
    yield from ((COMPLETIONS, {"prompt": "a", **own}) for own in fields)
    yield from ((CHAT, {"messages": [message]}) for message in messages)
    yield CHAT, {"messages": [USER], "tools": [long]}
    yield "/tokenize", {"model": long, "prompt": "a"}
    yield "/detokenize", {"tokens": [long]}


async def test_an_error_does_not_repeat_all_that_was_sent(served: Served) -> None:
    async with served() as http:
        for path, body in (*bodies(LONG), *bodies(SHORT)):
            reply = await http.post(path, json=body)
            assert 400 <= reply.status_code < 500, str(body)[:200]
            assert len(reply.content) < SHOWN, str(body)[:200]
            assert error_of(reply, reply.status_code)["message"]


async def test_nor_of_what_a_path_a_query_or_a_header_says(served: Served, tmp_path: Path) -> None:
    long = "x" * 20_000
    async with served(data_dir=str(tmp_path)) as http:
        paths = [f"/v1/{name}/{long}" for name in ("models", "files", "batches", "no")]
        for name in ("files", "batches"):
            paths += [f"/v1/{name}?{query}" for query in (f"after={long}", f"{long}=1")]
            paths.append(f"/v1/{name}?limit={long}")
        replies = [await http.get(path) for path in paths]
        names = {"content-encoding": long, "content-type": f"text/plain;{long}"}
        for header in (*names.items(), ("x-request-id", long)):
            replies.append(await http.post(COMPLETIONS, content=b"{}", headers=[header]))
        replies.append(await http.request("X" * 20_000, COMPLETIONS))
    for reply in replies:
        assert 400 <= reply.status_code < 500 and len(reply.content) < SHOWN, reply.url.path[:40]
        assert sum(map(len, reply.headers.values())) < SHOWN


def test_nor_does_an_error_of_a_line_of_a_batch() -> None:
    whole = {"custom_id": "a", "method": "POST", "url": COMPLETIONS, "body": {}}
    for fields in (
        *({**whole, name: SHORT} for name in ("custom_id", "method", "url", "body")),
        {**whole, SHORT: 1},
        {SHORT: 1},
    ):
        line = parse_line(json.dumps(fields).encode(), 1)
        assert isinstance(line, LineError)
        assert len(line.message) <= SHOWN and len(line.param or "") < 200


async def test_nor_does_the_result_of_a_line(text: Text, text_model: Path) -> None:
    body = json.dumps({"prompt": "a", "model": SHORT}).encode()
    line = BatchLine(1, "a", "POST", COMPLETIONS, body, 1)
    with answering(EngineClient("tcp://127.0.0.1:1"), text, text_model) as (completions, *_):
        answerers: dict[str, Any] = {COMPLETIONS: completions}
        result: LineResult = await answer_line(line, answerers, RequestOwner(), "batch_a")
    assert result.is_failed and len(result.record) < SHOWN


def test_the_last_resort_is_where_errors_are_made_and_sent() -> None:
    assert len(InvalidRequest("x" * 10**6, "y" * 10**6).message) == MAX_MESSAGE
    for error in (InvalidRequest("x" * 10**6, "y" * 10**6), StoreError("x" * 10**6)):
        assert len(msgspec.json.encode(body_of(error))) < MAX_MESSAGE + 500
