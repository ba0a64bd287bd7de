"""Events that are written without waking their streams' tasks: which, in what bytes, until when."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from prometheus_client import REGISTRY

from engine.client.client import EngineClient
from engine.client.streams import Stream
from engine.messages import Columns, Outputs, Request, SamplingParams
from server.generation.engine_request import RequestOwner
from server.generation.event_writer import EventWriter, Outlet
from server.generation.generation import Generation
from server.generation.rendering import Pieces
from server.schema.completion_request import parse_completion
from server.text.text import Text

WHOLE, CUT, END = 5, 6, 2


class Reply:
    """The body of a reply, as it is sent."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.on_pause: Callable[[], None] = lambda: None
        self.is_paused = False

    def write(self, data: bytes) -> None:
        self.sent.append(data)


class Two:
    """Two streams of a completion each, whose first event is sent."""

    def __init__(self) -> None:
        self.client = EngineClient("tcp://127.0.0.1:1")
        pieces: Any = Pieces.__new__(Pieces)
        pieces.json = np.array([b"%c" % (97 + token) for token in range(8)], np.object_)
        pieces.is_whole = np.arange(8) != CUT
        self.writer = EventWriter(self.client, pieces)
        streams = self.client._streams
        streams.spread.count = 1
        streams._sends = (self._hear,)
        self.heard: list[Request] = []
        params = SamplingParams(n=1)
        self.streams = [
            streams.open([Request(name, b"\5\0\0\0", params, emit="columns")]) for name in "ab"
        ]
        self.replies = [Reply(), Reply()]
        self.outlets = [Outlet(0.0), Outlet(0.0)]
        for outlet, reply, name in zip(self.outlets, self.replies, b"ab", strict=True):
            outlet.reply = reply
            outlet.begin, outlet.end = b"<%c " % name, b">"

    def _hear(self, message: Any) -> None:
        if isinstance(message, Request):
            self.heard.append(message)

    def say(self, *tokens: int, reasons: tuple[int, int] = (0, 0), version: int = 1) -> None:
        """A token of each stream."""
        numbers = [one.stream for one in self.heard[: len(tokens)]]
        columns = Columns(
            streams=np.array(numbers, "<i8").tobytes(),
            token_ids=np.array(tokens, "<i4").tobytes(),
            reasons=bytes(reasons[: len(tokens)]),
        )
        self.client._streams.receive(Outputs([], columns, version))

    def waiting(self, which: int, last_token: int = WHOLE) -> asyncio.Task[None]:
        return asyncio.create_task(
            self.writer.wait(self.streams[which], self.outlets[which], last_token)
        )


def taken(stream: Stream) -> list[int]:
    tokens: list[int] = stream.take().news.token_ids.tolist()
    return tokens


async def test_tokens_are_written_as_chunks_and_nobody_wakes() -> None:
    two = Two()
    name = "srm_inter_token_latency_seconds_count"
    before = REGISTRY.get_sample_value(name) or 0
    two.say(WHOLE, WHOLE)
    assert [taken(one) for one in two.streams] == [[WHOLE], [WHOLE]]
    tasks = [two.waiting(0), two.waiting(1)]
    await asyncio.sleep(0)
    for token in (WHOLE, 1, 0):
        two.say(token, WHOLE)
    await asyncio.sleep(0)
    assert two.replies[0].sent == [b"5\r\n<a f>\r\n", b"5\r\n<a b>\r\n", b"5\r\n<a a>\r\n"]
    assert two.replies[1].sent == [b"5\r\n<b f>\r\n"] * 3
    assert [one.num_tokens for one in two.outlets] == [3, 3]
    assert REGISTRY.get_sample_value(name) == before + 6
    assert not any(task.done() for task in tasks)
    for task in tasks:
        task.cancel()


@pytest.mark.parametrize(
    "odd",
    [
        lambda two: two.say(CUT),
        lambda two: two.say(END, reasons=(1, 0)),
        lambda two: two.say(1, version=2),
        lambda two: [two.replies[0].on_pause(), two.say(1)],
    ],
    ids=["part of a character", "an end", "other weights", "a slow client"],
)
async def test_what_is_odd_is_left_to_the_task_and_so_is_all_behind_it(
    odd: Callable[[Two], Any],
) -> None:
    two = Two()
    two.say(WHOLE)
    assert taken(two.streams[0]) == [WHOLE]
    task = two.waiting(0)
    await asyncio.sleep(0)
    two.say(1)
    odd(two)
    two.say(3)  # before the task has had its turn
    await task
    assert two.replies[0].sent == [b"5\r\n<a b>\r\n"]
    left = taken(two.streams[0])
    assert left in ([CUT, 3], [END], [1, 3])  # nothing comes behind an end
    two.say(4)
    assert len(two.replies[0].sent) == 1


@pytest.mark.parametrize(
    "what", ["no reply", "no frame", "a cut character", "a slow client", "older weights"]
)
async def test_a_stream_that_may_not_be_written_to_is_its_tasks(what: str) -> None:
    two = Two()
    if what == "no reply":
        two.outlets[0].reply = None
    elif what == "no frame":
        two.outlets[0].begin = b""
    elif what == "a slow client":
        two.replies[0].is_paused = True
    two.say(WHOLE, WHOLE)
    taken(two.streams[0])
    if what == "older weights":  # the other stream hears of the new ones first
        two.client._streams.weights_version = 2
    task = two.waiting(0, last_token=CUT if what == "a cut character" else WHOLE)
    await asyncio.sleep(0)
    two.say(1, version=2 if what == "older weights" else 1)
    await task
    assert not two.replies[0].sent and taken(two.streams[0]) == [1]


def test_tokens_that_were_written_count_as_completion_tokens_and_are_not_discarded(
    text: Text,
) -> None:
    """A key is charged the sum of both."""
    request = parse_completion(b'{"prompt": [5], "max_tokens": 4, "stream": true}')
    generation = Generation("a", request, [b"\5\0\0\0"], text, RequestOwner())
    generation.outlet.num_tokens = 3
    assert (generation.completion_tokens, generation.discarded_tokens) == (3, 0)
    assert generation.usage.completion_tokens == 3
