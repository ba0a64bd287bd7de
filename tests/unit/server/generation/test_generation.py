"""What the engine is asked for, and what becomes of its answers."""

from __future__ import annotations

import asyncio
import json
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.client.client import EngineClient
from engine.client.streams import Streams
from engine.messages import REASONS, Columns, Output, Outputs, Request, Status, ToEngine
from server.generation.generation import Generation
from server.generation.request_owner import RequestOwner
from server.schema.completion_request import parse_completion
from server.text.sample import Delta
from server.text.text import Text

STATUS = Status(
    state="ready",
    num_slots=8,
    running=0,
    waiting=0,
    max_waiting=100,
    retry_after_s=1,
    steps=0,
    n_ctx=64,
    vocab_size=32,
    fingerprint="",
)


class Scripted(EngineClient):
    """Answers every sample with one token; remembers what it was asked."""

    def __init__(self) -> None:
        super().__init__("tcp://127.0.0.1:1")
        self.requests: list[Request] = []
        self.status = STATUS
        self._streams = Streams(self._answer)

    def _answer(self, message: ToEngine) -> None:
        if isinstance(message, Request):
            self.requests.append(message)
            in_columns = message.emit == "columns"
            answer = as_columns(message) if in_columns else as_outputs(message)
            asyncio.get_running_loop().call_soon(self._streams.receive, answer)


def as_outputs(request: Request) -> Outputs:
    outputs = [
        Output(
            id=request.id,
            index=index,
            token_ids=array("i", [5 + index]).tobytes(),
            logprobs=array("f", [-float(index)]).tobytes(),
            finish_reason="length",
        )
        for index in range(request.params.n)
    ]
    return Outputs(outputs)


def as_columns(request: Request) -> Outputs:
    indices = np.arange(request.params.n)
    columns = Columns(
        streams=(request.stream + indices).astype("<i8").tobytes(),
        token_ids=(5 + indices).astype("<i4").tobytes(),
        reasons=bytes([REASONS.index("length")] * len(indices)),
    )
    return Outputs([], columns)


NOBODY = RequestOwner()


async def run(
    text_model: Path, sender: RequestOwner = NOBODY, **fields: Any
) -> tuple[Scripted, Generation, list[Delta]]:
    request = parse_completion(json.dumps({"prompt": [[5, 6], [7]], **fields}).encode())
    client = Scripted()
    generation = Generation(
        "made",
        request,
        [array("i", ids).tobytes() for ids in request.prompt if isinstance(ids, list)],
        Text(text_model),
        sender,
    )
    deltas = [delta async for news in generation.deltas(client) for delta in generation.texts(news)]
    return client, generation, deltas


@pytest.mark.parametrize("priority", [-7, 0, 7])
async def test_a_lower_priority_is_served_earlier(text_model: Path, priority: int) -> None:
    client, _, _ = await run(text_model, priority=priority)
    assert {request.priority for request in client.requests} == {-priority}  # larger is earlier


@pytest.mark.parametrize(
    ("fields", "emit", "logprobs"),
    [
        ({}, "final", None),
        ({"best_of": 4}, "final", 0),
        ({"best_of": 4, "logprobs": 3}, "delta", 3),
        ({"n": 2, "best_of": 2}, "final", None),
        ({"return_packed": True, "logprobs": 0}, "final", 0),
        ({"stop": "a"}, "columns", None),
        ({"stream": True}, "columns", None),
    ],
)
async def test_no_more_is_asked_of_the_engine_than_is_needed(
    text_model: Path, fields: dict[str, Any], emit: str, logprobs: int | None
) -> None:
    client, _, _ = await run(text_model, **fields)
    for request in client.requests:
        assert (request.emit, request.params.logprobs) == (emit, logprobs)
        assert request.params.n == fields.get("best_of", fields.get("n", 1))


async def test_of_all_candidates_the_best_are_chosen_and_all_are_counted(text_model: Path) -> None:
    _, generation, deltas = await run(text_model, n=2, best_of=5)
    assert sorted(delta.index for delta in deltas) == list(range(10))
    chosen = [choice for delta in deltas for choice in generation.choices(delta)]
    ids = {choice.index: int.from_bytes(choice.token_ids, "little") for choice in chosen}
    assert ids == {0: 5, 1: 6, 2: 5, 3: 6}
    assert generation.usage.completion_tokens == 10
    assert [generation.prompt_of(i).num_tokens for i in range(4)] == [2, 2, 1, 1]


async def test_the_engine_never_hears_the_clients_id(text_model: Path) -> None:
    client, generation, _ = await run(text_model, request_id="again")
    assert generation.id == "again"
    assert [request.id for request in client.requests] == ["made-0", "made-1"]


async def test_what_lasts_is_drawn_from_its_id(text_model: Path) -> None:
    sender = RequestOwner(share="a", weight=2.0, priority=-5, durable=True, created_unix=77)
    client, generation, _ = await run(text_model, sender)
    again, _, _ = await run(text_model, sender)
    assert client.requests == again.requests
    assert len({request.params.seed for request in client.requests}) == 2
    first = client.requests[0]
    assert (first.share, first.weight, first.priority, first.durable) == ("a", 2.0, -5, True)
    assert (first.emit, generation.created_unix) == ("final", 77)
    with_stops, _, _ = await run(text_model, sender, stop=["x"], seed=-1)
    assert {request.emit for request in with_stops.requests} == {"delta"}
    assert {request.params.seed for request in with_stops.requests} == {2**64 - 1}
