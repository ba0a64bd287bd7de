"""Tokens of several steps that come together: fewer events in each dialect, which say the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from srm.server.dialects.chat.format import ChatFormat
from srm.server.dialects.chat.tools import ToolFormat
from srm.server.text.text import Text
from tests.kit.serving import joined, parts_of
from tests.unit.server.reply import test_messages, test_responses
from tests.unit.server.reply.test_dialect import FlatFormat
from tests.unit.server.reply.test_stream_writer import (
    CAT,
    CONTINUOUS,
    CUT,
    LENGTH,
    MAT,
    REST,
    SPECIAL,
    STOP,
    THE,
    Served,
)
from tests.unit.server.reply.test_tools import ADDING, ONLY, SEVERAL, called, tokens_of

TOKENS = [THE, CAT, CUT, REST, THE, SPECIAL, MAT, CUT, THE, CAT, CAT, MAT]


def documents(body: bytes) -> list[Any]:
    """The JSON of a stream's events."""
    lines = body.decode().splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def choices(body: bytes) -> Any:
    """Each choice of a stream, and the usage that it ends with."""
    events = documents(body)
    count = 1 + max(choice["index"] for event in events for choice in event["choices"])
    return [joined(parts_of(events, index)) for index in range(count)], events[-1].get("usage")


def flat(body: bytes) -> Any:
    """The one choice of a stream whose event is a flat object."""
    events = documents(body)
    return joined([{**event, **event.pop("meta_info"), "id": None} for event in events])


def calls_of(body: bytes) -> Any:
    return called([choice["delta"] for choice in parts_of(documents(body), 0)])


def response(body: bytes) -> Any:
    """What is said once, and all deltas behind each other."""
    events = test_responses.events_of(body)
    deltas = [event for event in events if event.type.endswith(".delta")]
    others = [event for event in events if event not in deltas]
    text = "".join(event.delta for event in deltas)
    scores = [score for event in deltas for score in getattr(event, "logprobs", [])]
    return text, scores, [event.model_dump(exclude={"sequence_number"}) for event in others]


def message(body: bytes) -> Any:
    return test_messages.added_up(test_messages.events_of(body))


Form = Callable[..., Any] | None
COMPLETIONS: list[tuple[Form, dict[str, Any]]] = [
    (None, {}),
    (None, {"n": 3, "stream_options": CONTINUOUS, "logprobs": 2}),
    (None, {"logprobs": 0, "return_token_ids": True, "stop": ["xyz"]}),
    (None, {"return_packed": True, "logprobs": 1}),
    (None, {"stream_interval": 3}),
    (None, {"echo": True, "stop": ["t the"], "include_stop_str_in_output": True}),
    (ChatFormat, {"stream_options": CONTINUOUS}),
    (ChatFormat, {"logprobs": 2, "n": 2, "stop": ["e cat cat"]}),
]


async def check(
    text: Text, read: Callable[[bytes], Any], tokens: list[int], reason: int, **fields: Any
) -> None:
    bodies = []
    for together in (1, 2, 5):
        reply = await Served(text).stream(tokens, reason, together, **fields)
        bodies.append(b"".join(reply.sent))
    alone, *others = bodies
    for body in others:
        assert read(body) == read(alone)
        assert body.count(b"data: ") < alone.count(b"data: ")


@pytest.mark.parametrize(("dialect", "fields"), COMPLETIONS)
async def test_choices_are_the_same(text: Text, dialect: Form, fields: dict[str, Any]) -> None:
    await check(text, choices, TOKENS, LENGTH, dialect=dialect, **fields)


async def test_another_dialect_is_the_same(text: Text) -> None:
    await check(text, flat, TOKENS, LENGTH, dialect=FlatFormat)


@pytest.mark.parametrize(("calls", "spoken"), [(ONLY, '{"a":1}'), (SEVERAL, f"[{ADDING}]")])
async def test_calls_are_the_same(text: Text, calls: Any, spoken: str) -> None:
    tokens = [*tokens_of(text, spoken), SPECIAL]
    await check(text, calls_of, tokens, STOP, dialect=partial(ToolFormat, calls=calls))


@pytest.mark.parametrize("fields", [{}, test_responses.SCORES])
async def test_responses_are_the_same(text: Text, fields: dict[str, Any]) -> None:
    dialect, completion = test_responses.form_of(True, **fields)
    await check(text, response, TOKENS, LENGTH, dialect=dialect, **completion)


async def test_messages_are_the_same(text: Text) -> None:
    dialect, completion = test_messages.form_of(True)
    await check(text, message, TOKENS, LENGTH, dialect=dialect, **completion)
