"""Messages as Anthropic's clients read them: the reply, and every event of a stream."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from srm.server.dialects.messages.format import MessageFormat
from srm.server.dialects.messages.request import parse_message
from srm.server.errors import INTERNAL
from srm.server.text.text import Text
from tests.unit.server.reply.test_responses import ARGUMENTS, ONE_CALL, SEVERAL_CALLS
from tests.unit.server.reply.test_stream_writer import (
    ABORT,
    CAT,
    CUT,
    LENGTH,
    MAT,
    REST,
    STOP,
    THE,
    Served,
)

TOKENS = (THE, CAT, CUT, REST, THE, MAT)
ADD = {"name": "add", "input_schema": {"type": "object"}}
FIND = {**ADD, "name": "find"}
ANY = {"tools": [ADD, FIND], "tool_choice": {"type": "any", "disable_parallel_tool_use": False}}


def form_of(is_stream: bool, /, **fields: Any) -> Any:
    """The format of a request, and the fields of the completion that it becomes."""
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 99, **fields}
    chat = parse_message(json.dumps(body | {"stream": is_stream}).encode())
    completion = {"prompt": [5], "max_tokens": 99, "stream": is_stream, "stop": chat.stops}
    if is_stream:
        completion["stream_options"] = {"include_usage": True}
    return partial(MessageFormat, calls=chat.calls), completion


async def stream(
    text: Text, tokens: Sequence[int] = TOKENS, reason: int = STOP, **fields: Any
) -> tuple[list[Any], int]:
    """The events of a stream, and how many its task did not send."""
    dialect, completion = form_of(True, **fields)
    reply = await Served(text).stream(tokens, reason, dialect=dialect, **completion)
    return events_of(b"".join(reply.sent)), reply.num_written


async def render_whole(
    text: Text, tokens: Sequence[int] = TOKENS, reason: int = STOP, **fields: Any
) -> Any:
    dialect, completion = form_of(False, **fields)
    return await Served(text).render_whole(dialect, tokens, reason, **completion)


def events_of(body: bytes) -> list[Any]:
    """The events of a stream, whose lines `event:` must say the types of their JSON."""
    events = []
    for event in body.decode().removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def added_up(events: list[Any]) -> Any:
    """The message that the events of a stream are: those of each block behind each other."""
    first, *middle, ending, last = events
    assert first["type"] == "message_start" and last == {"type": "message_stop"}
    blocks: list[Any] = []
    for event in middle:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append((event["content_block"], []))
        elif event["type"] == "content_block_delta":
            blocks[event["index"]][1].append(event["delta"])
        else:
            assert event == {"type": "content_block_stop", "index": len(blocks) - 1}
    content = []
    for block, deltas in blocks:
        if block["type"] == "text":
            block["text"] = "".join(delta["text"] for delta in deltas)
        else:
            assert block["input"] == {}
            block["input"] = "".join(delta["partial_json"] for delta in deltas)
        content.append(block)
    return first["message"] | ending["delta"] | {"content": content, "usage": ending["usage"]}


def tokens_of(text: Text, content: str) -> list[int]:
    return [int.from_bytes(text.encode([character])[0][-4:], "little") for character in content]


async def test_a_stream_adds_up_to_the_message(text: Text) -> None:
    events, num_written = await stream(text)
    assert num_written
    message, expected = added_up(events), await render_whole(text)
    own = {"id", "model", "weights_version", "system_fingerprint"}
    assert {k: v for k, v in message.items() if k not in own} == {
        k: v for k, v in expected.items() if k not in own
    }
    assert expected["content"][0]["type"] == "text" and expected["stop_reason"] == "end_turn"
    assert events[0]["message"]["content"] == [] and events[0]["message"]["stop_reason"] is None
    assert message["usage"]["input_tokens"] + message["usage"]["cache_read_input_tokens"] == 1
    assert message["usage"]["output_tokens"] == len(TOKENS)


@pytest.mark.parametrize(
    ("reason", "fields", "expected"),
    [
        (LENGTH, {}, ("max_tokens", None)),
        (LENGTH, {"stop_sequences": ["mat"]}, ("stop_sequence", "mat")),
        (ABORT, {}, ("max_tokens", None)),
    ],
)
async def test_a_message_says_what_ended_it(
    text: Text, reason: int, fields: dict[str, Any], expected: tuple[str, str | None]
) -> None:
    for message in (
        added_up((await stream(text, reason=reason, **fields))[0]),
        await render_whole(text, reason=reason, **fields),
    ):
        assert (message["stop_reason"], message["stop_sequence"]) == expected


async def test_calls_are_blocks(text: Text) -> None:
    one = {"tools": [ADD], "tool_choice": {"type": "tool", "name": "add"}}
    for content, fields, expected in (
        (ONE_CALL, one, [("add", ONE_CALL)]),
        (f"[{SEVERAL_CALLS}]", ANY, [*zip(["find", "add"], ARGUMENTS, strict=True)]),
        (SEVERAL_CALLS.partition(", ")[0], {"tools": [FIND]}, [("find", ARGUMENTS[0])]),
    ):
        tokens = tokens_of(text, content + "x")
        events, _ = await stream(text, tokens, **fields)
        message = added_up(events)
        assert [(block["name"], block["input"]) for block in message["content"]] == expected
        assert message["stop_reason"] == "tool_use"
        same = await render_whole(text, tokens, **fields)
        assert [block["input"] for block in same["content"]] == [
            json.loads(arguments) for _, arguments in expected
        ]
        assert len({block["id"] for block in same["content"]}) == len(expected)
        assert same["stop_reason"] == "tool_use"


@pytest.mark.parametrize("reason", [LENGTH, ABORT])
async def test_a_call_that_is_cut_is_left_out(text: Text, reason: int) -> None:
    tokens = tokens_of(text, f"[{SEVERAL_CALLS[:-6]}")
    message = await render_whole(text, tokens, reason, **ANY)
    assert [block["name"] for block in message["content"]] == ["find"]
    assert message["stop_reason"] == "max_tokens"


async def test_where_tools_may_be_called_a_text_is_text(text: Text) -> None:
    message = await render_whole(text, tools=[ADD])
    assert message["content"] == (await render_whole(text))["content"]
    assert added_up((await stream(text, tools=[ADD]))[0])["content"] == message["content"]


def test_an_error_is_an_event(text: Text) -> None:
    dialect, completion = form_of(True)

    async def framed() -> bytes:
        served = Served(text)
        _, task = await served.ask(dialect=dialect, **completion)
        task.cancel()
        return served.outlets[0].renderer.form.frame_error(INTERNAL)

    (event,) = events_of(asyncio.run(framed()))
    error = {"type": "api_error", "message": "internal server error"}
    assert event == {"type": "error", "error": error}
