"""A stream that has nothing to send says so, before its first token and between two."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from openai._streaming import SSEDecoder

from srm.errors import StepFailed
from srm.loadtest.client.event_stream import EventParser
from srm.server.http.responses import WAITING, EventStream
from srm.server.text.text import Text
from tests.unit.server.reply.test_stream_writer import CAT, MAT, THE, Reply, Served, turns

AT_ONCE = 1e-6
"""Seconds, so that every wait of a test is long."""
NEVER = 1e6
WAYS: list[dict[str, Any]] = [
    {},
    {"is_chat": True},
    {"stop": ["cat m"]},
    {"n": 17},
    {"n": 17, "stream_whole": True},
    {"n": 2, "stream_whole": True, "until": {"match": "x", "count": 1}},
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
]


async def until(is_so: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not is_so():
            await asyncio.sleep(0)


def data_of(reply: Reply) -> list[bytes]:
    """Return the events that the load test's parser reads; OpenAI's SDK has to read the same."""
    sent = b"".join(reply.sent)
    data = EventParser().parse(sent)
    assert [event.data.encode() for event in SSEDecoder().iter_bytes(iter([sent]))] == data
    return data


@pytest.mark.parametrize("fields", WAYS)
@pytest.mark.parametrize("is_direct", [True, False])
async def test_bytes_while_it_waits(text: Text, fields: dict[str, Any], is_direct: bool) -> None:
    served = Served(text, is_direct, 0.0, AT_ONCE)
    reply, task = await served.ask(**fields)
    await until(lambda: len(reply.sent) > 2)
    assert {*reply.sent} == {WAITING} and not reply.num_written
    indices = range(fields.get("n", 1))
    for token in (THE, CAT):
        served.say({(0, index): token for index in indices})
        await turns()
        count = reply.sent.count(WAITING)
        await until(lambda count=count: reply.sent.count(WAITING) > count + 1)  # type: ignore[misc]
    served.say({(0, index): MAT for index in indices}, ends={(0, index) for index in indices})
    await asyncio.wait_for(task, 60)

    undisturbed = Served(text, is_direct, 0.0, NEVER)
    plain, task = await undisturbed.ask(**fields)
    for token in (THE, CAT):
        undisturbed.say({(0, index): token for index in indices})
        await turns()
    undisturbed.say({(0, index): MAT for index in indices}, ends={(0, index) for index in indices})
    await asyncio.wait_for(task, 60)
    assert WAITING not in plain.sent
    assert timeless(data_of(reply)) == timeless(data_of(plain))


def timeless(data: list[bytes]) -> list[Any]:
    """Events but for how a step's tokens are divided among them."""
    texts: dict[int, str] = {}
    for event in map(json.loads, data):
        for choice in event["choices"]:
            part = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
            texts[choice["index"]] = texts.get(choice["index"], "") + part
    last = json.loads(data[-1])
    return [texts, last.get("usage"), last["weights_version"]]


async def test_comments_do_not_begin_a_stream_for_who_writes_tokens(text: Text) -> None:
    """The first event of a chat has its role; a token that was written before would lack it."""
    served = Served(text, True, 0.0, AT_ONCE)
    reply, _ = await served.ask(is_chat=True)
    await until(lambda: WAITING in reply.sent)
    served.say_each(THE)
    before = reply.num_written
    await turns()
    served.say_each(CAT)
    assert (before, reply.num_written) == (0, 1)
    assert json.loads(data_of(reply)[0])["choices"][0]["delta"] == {
        "role": "assistant",
        "content": "",
    }


async def response_to(served: Served, sent: list[Any]) -> None:
    """Answer a request as its endpoint does."""

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("nobody asks")

    body = json.dumps({"prompt": [5], "stream": True}).encode()
    response = await served.route.answer(body)
    assert isinstance(response, EventStream)
    await response({"type": "http"}, receive, send)


@pytest.mark.parametrize("keepalive_s", [0.0, NEVER, AT_ONCE])
async def test_a_refusal_has_its_status_unless_begun(text: Text, keepalive_s: float) -> None:
    served, sent = Served(text, True, 0.0, keepalive_s), []  # type: ignore[var-annotated]
    task = asyncio.create_task(response_to(served, sent))
    await until(lambda: served.heard and (sent[1:] or keepalive_s != AT_ONCE))
    served.client.streams.refuse(served.heard[0].id, StepFailed("the step failed"))
    if keepalive_s != AT_ONCE:
        with pytest.raises(StepFailed):
            await asyncio.wait_for(task, 60)
        assert not sent
        return
    await asyncio.wait_for(task, 60)
    bodies = [message.get("body") for message in sent]
    assert sent[0]["status"] == 200 and bodies[1] == WAITING
    assert b'"the step failed"' in bodies[-2] and bodies[-1] == b"data: [DONE]\n\n"


async def test_the_timer_of_a_stream_ends_with_it(text: Text) -> None:
    served = Served(text, True, 0.0, AT_ONCE)
    outlet_reply, task = await served.ask()
    served.say({(0, 0): THE}, ends={(0, 0)})
    await asyncio.wait_for(task, 60)
    outlet = served.outlets[0]
    outlet.is_quiet, outlet.last_sent = False, 0.0
    await turns()
    assert not outlet.is_quiet and outlet_reply.sent
