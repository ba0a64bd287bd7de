"""Events that are written without waking their streams' tasks: in what bytes, until when."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import REGISTRY

from srm.engine.client.client import EngineClient
from srm.engine.messages import PROMPT, REASONS, Output, Outputs, Request, Status, StopSamples
from srm.engine.steps.tokens import step_tokens
from srm.server.dialects.chat.format import ChatFormat
from srm.server.dialects.completions.endpoint import Completions
from srm.server.dialects.completions.models import Models
from srm.server.generation.engine_request import RequestOwner
from srm.server.generation.generation import Generation
from srm.server.reply.format import Format
from srm.server.reply.renderer import Renderer
from srm.server.reply.responder import Responder
from srm.server.reply.scores import ScoreWriter
from srm.server.reply.stream_writer import Outlet
from srm.server.schema.completion_response import Choice
from srm.server.text.text import Text
from tests.kit.serving import joined, parts_of

STOP, LENGTH, ABORT = map(REASONS.index, ("stop", "length", "abort"))
WIDTH = 4
"""Alternatives in a step's rows."""
STATUS = Status("ready", 9, 0, 0, 99, 1, 0, 512, 320, "f")
CONTINUOUS = {"include_usage": True, "continuous_usage_stats": True}
THE, CAT, MAT, CUT, REST, NEWLINE, SPECIAL = 263, 264, 269, 129, 104, 200, 1
"""Words; the two bytes of é; and what reads as nothing."""


class Reply:
    """The body of a reply, as it is sent: by its task, and by others."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.num_written = 0
        self.is_paused = False
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()

    def write(self, data: bytes) -> bool:
        size, _, rest = data.partition(b"\r\n")
        assert len(rest) == int(size, 16) + 2 and rest.endswith(b"\r\n")
        self.sent.append(rest[:-2])
        self.num_written += 1
        return not self.is_paused

    def pause(self) -> None:
        self.is_paused = True
        self.may_go_on.clear()

    def resume(self) -> None:
        self.is_paused = False
        self.may_go_on.set()

    async def send_all(self, events: AsyncGenerator[bytes, None], outlet: Outlet | None) -> None:
        """Send what a task makes, as EventStream does; `outlet` None: nobody else may."""
        async for event in events:
            self.sent.append(event)
            if outlet is not None:
                outlet.connection = self
            await self.may_go_on.wait()

    @property
    def events(self) -> list[dict[str, Any]]:
        message = b"".join(self.sent).removeprefix(b"data: ").removesuffix(b"\n\n")
        return [json.loads(event) for event in message.split(b"\n\ndata: ")]


class Served:
    """Requests that an engine answers as a test says."""

    def __init__(self, text: Text, is_direct: bool = True, *rates: float) -> None:
        """`rates`: as Responder takes them."""
        self.text, self._is_direct = text, is_direct
        self.client = EngineClient("tcp://127.0.0.1:1")
        self.client.status = STATUS
        streams = self.client.streams
        streams.spread.count = 1
        streams._sends = (self._read_message,)
        self.heard: list[Request] = []
        self.stopped: list[StopSamples] = []
        self.outlets: list[Outlet] = []
        models = Models("m%d", text.model.n_ctx)
        self.responder = Responder(self.client, text, *rates)
        self.route = Completions(self.client, text, models, self.responder)

    def _read_message(self, message: Any) -> None:
        if isinstance(message, Request):
            self.heard.append(message)
        elif isinstance(message, StopSamples):
            self.stopped.append(message)

    async def ask(
        self,
        is_chat: bool = False,
        dialect: Callable[[Generation], Format] | None = None,
        **fields: Any,
    ) -> tuple[Reply, asyncio.Task[None]]:
        body = {"prompt": [5], "max_tokens": 99, "stream": True, **fields}
        id = f"r{len(self.heard)}"
        owner = RequestOwner(created_unix=1)
        form: Format = await self.route.begin(json.dumps(body).encode(), id, owner)
        if dialect := ChatFormat if is_chat else dialect:
            form = dialect(form.generation)
        reply, outlet = Reply(), Outlet(Renderer(form, self.client, self.responder.pieces))
        self.outlets.append(outlet)
        sending = reply.send_all(self.responder.events(outlet), outlet if self._is_direct else None)
        task = asyncio.create_task(sending)
        await turns()
        return reply, task

    @property
    def generations(self) -> list[Generation]:
        return [outlet.renderer.generation for outlet in self.outlets]

    @property
    def tokens(self) -> list[tuple[int, int]]:
        """What each request's key is charged: its tokens in the reply, and the others."""
        return [
            (generation.completion_tokens, generation.discarded_tokens)
            for generation in self.generations
        ]

    def say(
        self,
        entries: dict[tuple[int, int], int],
        ends: Any = (),
        version: int = 1,
        reason: int = LENGTH,
        is_last: bool = True,
    ) -> None:
        """Tokens, by request and completion; more comes together with them if not `is_last`."""
        numbers = [self.heard[request].stream + index for request, index in entries]
        token_ids = np.array([*entries.values()], "<i4")
        # The token itself is among its alternatives, or not; sometimes there are fewer.
        top_ids = (
            token_ids[:, None] + np.arange(WIDTH, dtype="<i4") + token_ids[:, None] % 2
        ) % 320
        top_ids[token_ids % 7 == 0, 1:] = -1
        is_asked = bool(self.heard[-1].params.logprobs)
        tokens = step_tokens(
            np.array(numbers, "<i8"),
            token_ids,
            np.array([reason if key in ends else 0 for key in entries], np.uint8),
            (-0.1 * token_ids).astype("<f4"),
            *((top_ids, (-0.3 * top_ids).astype("<f4")) if is_asked else ()),
        )
        self.client.streams.receive(Outputs([], tokens.to_wire(), weights_version=version))
        if is_last:
            self.client.streams.settle()

    async def stream(
        self, tokens: Sequence[int], reason: int = LENGTH, together: int = 1, **fields: Any
    ) -> Reply:
        """Ask for a stream whose completions have these tokens, the last of which ends them; so
        many come `together`, but for the first one and the last."""
        reply, task = await self.ask(**fields)
        await self._end(tokens, reason, fields.get("n", 1), task, together)
        return reply

    async def render_whole(
        self, dialect: Any, tokens: Sequence[int], reason: int = LENGTH, **fields: Any
    ) -> Any:
        """Ask for the same as a whole reply."""
        body = json.dumps({"prompt": [5], "max_tokens": 99, **fields}).encode()
        form = await self.route.begin(body, "msg_r0", RequestOwner(created_unix=1))
        dialect = dialect(form.generation)
        task = asyncio.create_task(self.responder.render_whole(dialect))
        await turns()
        await self._end(tokens, reason, fields.get("n", 1), task)
        return json.loads(task.result())

    async def _end(
        self,
        tokens: Sequence[int],
        reason: int,
        n: int,
        task: asyncio.Task[Any],
        together: int = 1,
    ) -> None:
        own = [(len(self.heard) - 1, index) for index in range(n)]
        for at, token in enumerate(tokens[:-1]):
            is_last = at % together == 0 or at == len(tokens) - 2
            self.say(dict.fromkeys(own, token), is_last=is_last)
            if is_last:
                await turns()
        self.say(dict.fromkeys(own, tokens[-1]), own, reason=reason)
        await asyncio.wait_for(task, 60)

    def say_each(self, *tokens: int, version: int = 1) -> None:
        """Tokens of the first completion of the first request, one by one."""
        for token in tokens:
            self.say({(0, 0): token}, version=version)


@pytest.fixture
def served(text: Text) -> Served:
    return Served(text)


async def turns(count: int = 12) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def begun(served: Served, **fields: Any) -> tuple[Reply, asyncio.Task[None]]:
    """A stream of one choice whose first event is sent."""
    reply, task = await served.ask(**fields)
    served.say({(len(served.heard) - 1, 0): THE})
    await turns()
    assert len(reply.events) == 1 and reply.num_written == 0
    return reply, task


async def test_usage_counts_what_was_written_before(served: Served) -> None:
    reply, _ = await begun(served, stream_options=CONTINUOUS)
    served.say_each(CUT, REST, CAT)
    assert reply.num_written == 2
    counts = [(event["usage"]["completion_tokens"], event["model"]) for event in reply.events]
    assert counts == [(1, "m%d"), (3, "m%d"), (4, "m%d")]
    assert reply.events[-1]["usage"]["total_tokens"] == 5


async def test_a_later_choice_counts_what_was_written(served: Served) -> None:
    reply, _ = await served.ask(is_chat=True, n=2, stream_options=CONTINUOUS)
    served.say_each(THE)
    await turns()
    served.say_each(CAT, MAT)
    served.say({(0, 1): THE})
    counts = [event["usage"]["completion_tokens"] for event in reply.events]
    assert (counts, reply.num_written) == ([0, 1, 2, 3, 3, 4], 3)


async def test_scores_are_written_with_the_place_of_each_token(served: Served) -> None:
    reply, _ = await begun(served, logprobs=0)
    served.say_each(CAT, CUT, REST, MAT)
    assert reply.num_written == 4
    scores = [event["choices"][0]["logprobs"] for event in reply.events]
    assert [score["text_offset"] for score in scores] == [[0], [4], [8], [8], [9]]
    assert [score["tokens"][0] for score in scores] == [
        *(" the", " cat", "bytes:\\xc3", "bytes:\\xa9", " mat")
    ]


async def test_a_stream_of_few_events_has_all_tokens_in_them(text: Text) -> None:
    served = Served(text, True, 1e-6)
    reply, task = await begun(served)
    for token in (CAT, MAT):
        served.say_each(token)
        await turns()
    assert texts(reply) == [" the"]  # and no more for 11 days
    task.cancel()
    served = Served(text, True, 1e9)
    reply, task = await begun(served)
    served.say_each(CAT, MAT)
    served.say({(0, 0): THE}, ends={(0, 0)})
    await asyncio.wait_for(task, 60)
    assert texts(reply) == [" the", " cat mat the"] and not reply.num_written


async def test_the_end_of_a_stream_of_few_events_is_not_waited_for(text: Text) -> None:
    served = Served(text, True, 1e-6)
    reply, task = await served.ask()
    served.say({(0, 0): THE}, ends={(0, 0)})
    await asyncio.wait_for(task, 60)
    assert texts(reply) == [" the"]


async def test_what_needs_no_engine_is_no_reason_to_wait(text: Text) -> None:
    served = Served(text, True, 1e-6)
    _, task = await served.ask(echo=True, max_tokens=0)
    await asyncio.wait_for(task, 60)
    await served.ask(prompt=[[5], [6, 7]], echo=True, logprobs=0, max_tokens=0)
    assert len(served.heard) == 1  # for the scores of the second prompt


def texts(reply: Reply) -> list[str]:
    return [choice["text"] for event in reply.events for choice in event["choices"]]


async def test_tokens_are_written_in_one_event_each_and_nobody_wakes(served: Served) -> None:
    name = "srm_inter_token_latency_seconds_count"
    replies = [(await begun(served))[0] for _ in range(2)]
    before = REGISTRY.get_sample_value(name) or 0
    for token in (CAT, CUT, REST, MAT):
        served.say({(0, 0): token, (1, 0): MAT})
    assert texts(replies[0]) == [" the", " cat", "é", " mat"]
    assert texts(replies[1]) == [" the", *4 * [" mat"]]
    assert [reply.num_written for reply in replies] == [3, 4]
    assert REGISTRY.get_sample_value(name) == before + 7


@pytest.mark.parametrize("fields", [{}, {"logprobs": 0}], ids=["text", "scores"])
async def test_tokens_that_come_together_are_one_event(
    served: Served, fields: dict[str, Any]
) -> None:
    replies = [(await begun(served, **fields))[0] for _ in range(2)]
    steps = [{(0, 0): token, (1, 0): MAT} for token in (CAT, CUT, REST, MAT)]
    for step in steps[:-1]:
        served.say(step, is_last=False)
    assert [reply.num_written for reply in replies] == [0, 0]
    served.say(steps[-1])
    assert texts(replies[0]) == [" the", " caté mat"]
    assert texts(replies[1]) == [" the", " mat mat mat mat"]
    served.say_each(CAT)
    assert texts(replies[0])[-1] == " cat"
    if fields:
        scores = [event["choices"][0]["logprobs"] for event in replies[0].events]
        assert [score["text_offset"] for score in scores] == [[0], [4, 8, 8, 9], [13]]
        logprobs = scores[1]["token_logprobs"]
        assert logprobs == pytest.approx([-0.1 * token for token in (CAT, CUT, REST, MAT)])


async def test_scores_are_those_of_streams_that_ask_for_them(served: Served) -> None:
    """Of steps that come together, the streams that ask differ, and in how many they ask for."""
    fields: list[dict[str, Any]] = [{}, {"logprobs": 0}, {"logprobs": 2}]
    replies = [(await begun(served, **own))[0] for own in fields]
    number = np.array([served.heard[0].stream])
    step = step_tokens(number, np.array([CAT], "<i4"), np.zeros(1, np.uint8))  # without scores
    served.client.streams.receive(Outputs([], step.to_wire(), weights_version=1))
    served.say({(1, 0): MAT, (2, 0): CAT, (0, 0): THE}, is_last=False)
    served.say({(2, 0): MAT, (0, 0): MAT, (1, 0): CAT})
    assert [texts(reply)[-1] for reply in replies] == [" cat the mat", " mat cat", " cat mat"]
    plain, own, top = (reply.events[-1]["choices"][0]["logprobs"] for reply in replies)
    assert plain is None
    assert own["tokens"] == [" mat", " cat"] and top["tokens"] == [" cat", " mat"]
    assert own["token_logprobs"] == pytest.approx([-0.1 * MAT, -0.1 * CAT])
    assert top["token_logprobs"] == pytest.approx([-0.1 * CAT, -0.1 * MAT])
    assert [len(tops) for tops in own["top_logprobs"]] == [1, 1]
    assert [len(tops) for tops in top["top_logprobs"]] == [2 + CAT % 2, 2 + MAT % 2]


async def test_usage_counts_all_tokens_of_an_event(served: Served) -> None:
    reply, _ = await begun(served, stream_options=CONTINUOUS)
    for token in (CAT, MAT):
        served.say({(0, 0): token}, is_last=False)
    served.say_each(THE, CAT)
    counts = [event["usage"]["completion_tokens"] for event in reply.events]
    assert counts == [1, 4, 5]


async def test_a_stop_string_delays_no_other_stream(served: Served) -> None:
    replies = [(await begun(served, **fields))[0] for fields in ({}, {"stop": ["the t"]})]
    for token in (CAT, MAT):
        served.say({(0, 0): token, (1, 0): token}, is_last=False)
    served.say({(0, 0): THE, (1, 0): THE})
    assert texts(replies[0]) == [" the", " cat mat the"]
    assert texts(replies[1]) == [" ", "the cat mat "]


@pytest.mark.parametrize("fields", [{}, {"logprobs": 0}], ids=["text", "scores"])
async def test_what_comes_behind_a_stop_string_is_dropped(
    served: Served, fields: dict[str, Any]
) -> None:
    reply, task = await begun(served, stop=[" mat"], **fields)
    for token in (CAT, MAT, CAT):
        served.say({(0, 0): token}, is_last=False)
    served.say({(0, 0): THE})
    await asyncio.wait_for(task, 60)
    assert "".join(texts(reply)) == " the cat"
    assert reply.events[-1]["choices"][0]["finish_reason"] == "stop"
    assert len(served.stopped) == 1


@pytest.mark.parametrize("fields", [{}, {"logprobs": 0}], ids=["text", "scores"])
@pytest.mark.parametrize("behind", ["its end", "other weights", "scores"])
async def test_a_stop_string_is_found_across_steps_that_came_together(
    served: Served, fields: dict[str, Any], behind: str
) -> None:
    """Another takes its second token than the writer."""
    reply, task = await begun(served, stop=["cat mat"], **fields)
    served.say({(0, 0): CAT}, is_last=False)
    if behind == "scores":
        served.client.streams.receive(Outputs([Output(served.heard[0].id, PROMPT)]))
    version, ends = 2 if behind == "other weights" else 1, {(0, 0)} if behind == "its end" else ()
    served.say({(0, 0): MAT}, ends, version, is_last=False)
    served.client.streams.settle()
    await asyncio.wait_for(task, 60)
    assert "".join(texts(reply)) == " the "
    assert reply.events[-1]["choices"][0]["finish_reason"] == "stop"


async def test_steps_of_other_weights_come_behind_those_before(served: Served) -> None:
    reply, _ = await begun(served)
    served.say({(0, 0): CAT}, is_last=False)
    served.say({(0, 0): MAT}, version=2)
    await turns()
    assert texts(reply) == [" the", " cat", " mat"]
    assert [event["weights_version"] for event in reply.events] == [1, 1, 2]


async def test_an_end_is_written_behind_what_came_with_it(served: Served) -> None:
    reply, task = await begun(served)
    served.say({(0, 0): CAT}, is_last=False)
    served.say({(0, 0): MAT}, ends={(0, 0)})
    await asyncio.wait_for(task, 60)
    assert texts(reply) == [" the", " cat", " mat"]


async def test_choices_with_news_are_written_together(served: Served) -> None:
    reply, _ = await served.ask(n=3)
    served.say_each(THE)
    await turns()
    served.say({(0, 0): CAT, (0, 1): MAT, (0, 2): CUT})  # two of which begin
    served.say({(0, 2): REST})
    assert reply.num_written == 2 and len(reply.sent) == 3
    choices = [event["choices"] for event in reply.events]
    assert [(item["index"], item["text"]) for (item,) in choices] == [
        *((0, " the"), (0, " cat"), (1, " mat"), (2, "é"))
    ]


@pytest.mark.parametrize(
    "odd",
    [
        lambda served, _: served.say({(0, 0): MAT}, ends={(0, 0)}),
        lambda served, _: served.say_each(MAT, version=2),
        lambda served, reply: [reply.pause(), served.say_each(MAT)],
    ],
    ids=["an end", "other weights", "a slow client"],
)
async def test_leaves_odd_ones_to_tasks(
    served: Served, odd: Callable[[Served, Reply], Any]
) -> None:
    reply, _ = await begun(served)
    served.say_each(CAT)
    odd(served, reply)
    num_written = reply.num_written
    assert num_written == 1 + reply.is_paused  # which shows when more is written
    served.say_each(THE, version=2)  # before the task has had its turn
    await turns()
    assert reply.num_written == num_written
    assert "".join(texts(reply)).startswith(" the cat mat")
    reply.resume()
    await turns()
    served.say_each(THE, THE, version=2)  # written, once the task has taken all that came
    is_over = reply.events[-1]["choices"][0]["finish_reason"] is not None
    assert reply.num_written == num_written + 2 * (not is_over)


@pytest.mark.parametrize("what", ["no reply", "no event", "a slow client", "older weights"])
async def test_a_stream_that_may_not_be_written_to_is_its_tasks(text: Text, what: str) -> None:
    served = Served(text, is_direct=what != "no reply")
    reply, _ = await served.ask()
    if what == "a slow client":
        reply.pause()
    if what != "no event":
        served.say_each(THE)
        if what == "older weights":  # another stream hears of the new ones first
            served.client.streams.table.version = 2
        await turns()
    if what == "a slow client":
        reply.may_go_on.set()  # it has read some, but not enough
        await turns()
    served.say({(0, 0): CAT}, version=2 if what == "older weights" else 1)
    assert not reply.num_written
    await turns()
    assert not reply.num_written and texts(reply)[-1] == " cat"


async def test_a_stop_string_frees_a_slot_though_nobody_woke(served: Served) -> None:
    reply, task = await served.ask(n=2, stop=["cat m", "\n\n"])
    served.say({(0, 0): THE, (0, 1): THE})
    await turns()
    served.say({(0, 0): CAT, (0, 1): CAT})  # held back
    served.say({(0, 0): MAT, (0, 1): THE})
    assert [np.frombuffer(future.indices, "<i4").tolist() for future in served.stopped] == [[0]]
    served.say({(0, 0): MAT, (0, 1): NEWLINE})  # the first was on its way
    served.say({(0, 1): NEWLINE})
    assert reply.num_written and len(served.stopped) == 2
    await turns()
    assert task.done()
    choices = [choice for event in reply.events for choice in event["choices"]]
    results = [
        "".join(choice["text"] for choice in choices if choice["index"] == index)
        for index in (0, 1)
    ]
    assert results == [" the ", " the cat the"]
    ends = [choice for choice in choices if choice["finish_reason"]]
    assert [(item["index"], item["stop_reason"]) for item in ends] == [(0, "cat m"), (1, "\n\n")]


async def test_a_stop_string_begun_before_a_pause_frees_its_slot(text: Text) -> None:
    served = Served(text)
    reply, task = await begun(served, stop=["cat m"])
    served.say({(0, 0): CAT})  # written directly, but for what is held back
    assert reply.num_written == 1
    reply.pause()
    served.say({(0, 0): MAT})
    await turns()
    assert len(served.stopped) == 1
    reply.resume()
    await asyncio.wait_for(task, 60)
    assert "".join(texts(reply)) == " the "
    assert reply.events[-1]["choices"][0]["stop_reason"] == "cat m"


async def test_the_beginning_of_a_stop_string_is_forgotten(served: Served) -> None:
    """Whoever sends the token behind it: it once ended a reply without its last event."""
    reply, task = await begun(served, stop=["cat m"], return_token_ids=True)
    for token, version in ((CAT, 2), (THE, 2), (MAT, 3)):  # by the task, the writer, the task
        served.say_each(token, version=version)
        await turns()
    assert (reply.num_written, served.stopped, task.done()) == (1, [], False)
    assert "".join(texts(reply)) == " the cat the mat"


async def test_what_comes_while_a_client_does_not_read_is_one_event(text: Text) -> None:
    served = Served(text)
    replies = [(await begun(served))[0] for _ in range(2)]
    replies[0].pause()
    for token in (THE, CAT, MAT, THE, CAT):
        served.say({(0, 0): token, (1, 0): token})
        await turns()
    assert texts(replies[0]) == [" the", " the", " cat"]
    replies[0].resume()
    await turns()
    assert texts(replies[0]) == [" the", " the", " cat", " mat the cat"]
    assert texts(replies[1]) == [" the", " the", " cat", " mat", " the", " cat"]


async def test_all_of_a_delivery_is_sent_before_what_is_written(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The choices of a large delivery are sent some at a time."""
    monkeypatch.setattr("srm.server.reply.renderer.AT_ONCE", 1)
    reply, _ = await served.ask(n=3)
    served.say({(0, 0): THE, (0, 1): THE, (0, 2): THE})
    for _ in range(9):
        await turns(1)
        served.say({(0, 2): CAT})
    await turns()
    assert "".join(part["text"] for part in parts_of(reply.events, 2)) == " the" + 9 * " cat"
    served.say({(0, 2): MAT})
    assert reply.num_written and texts(reply)[-1] == " mat"


@pytest.mark.parametrize("num_turns", range(4))
async def test_begins_behind_scores(served: Served, num_turns: int) -> None:
    reply, _ = await served.ask(prompt=[[5], [6, 7]], prompt_logprobs=0)
    served.say_each(THE)
    await turns()
    served.say_each(CAT)
    assert reply.num_written == 1  # so those of the other prompt come while this one is written
    ids, number, rank = (np.array([number], "<i4").tobytes() for number in (7, 0, 1))
    score = Output(served.heard[1].id, PROMPT, ids, number, rank)
    served.client.streams.receive(Outputs([score]))
    await turns(num_turns)
    served.say({(0, 0): MAT, (1, 0): THE})
    await turns()
    served.say({(0, 0): MAT, (1, 0): THE})
    assert reply.num_written > 1
    first = next(
        choice for event in reply.events for choice in event["choices"] if choice["index"] == 1
    )
    assert [*first["prompt_logprobs"][1]] == ["7"]


class Broken(Exception):
    """What a bug raises."""


def broken(*_: Any) -> Any:
    raise Broken


@pytest.mark.parametrize("where", ["rendering", "counting", "sending"])
async def test_a_bug_ends_the_request_that_meets_it(served: Served, where: str) -> None:
    replies = [await begun(served, stream_options=CONTINUOUS) for _ in range(3)]
    served.say({(0, 0): CAT, (1, 0): CAT, (2, 0): CAT})
    renderer = served.outlets[1].renderer
    if where == "rendering":
        (number,) = served.outlets[1].stream.numbers
        served.responder._writer._choices[number].template = None  # type: ignore[union-attr]
        renderer.events = broken  # type: ignore[assignment, method-assign]
    elif where == "counting":
        renderer.update_counts = broken  # type: ignore[method-assign]
    else:
        replies[1][0].write = broken  # type: ignore[assignment, method-assign]
    for _ in range(2):
        served.say({(0, 0): MAT, (1, 0): MAT, (2, 0): MAT})
    await turns()
    assert [task.done() for _, task in replies] == [False, True, False]
    with pytest.raises(Broken):
        await replies[1][1]
    served.say({(0, 0): MAT, (2, 0): MAT})
    assert texts(replies[0][0]) == texts(replies[2][0]) == [" the", " cat", *3 * [" mat"]]
    assert not served.client.streams.has_request(served.heard[1].id)  # its slot is given back


async def test_renders_scores_one_by_one(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    reply, _ = await begun(served, logprobs=0)
    monkeypatch.setattr(ScoreWriter, "render_each", broken)
    served.say_each(CAT)
    assert reply.events[-1]["choices"][0]["logprobs"]["tokens"] == [" cat"]


FIELDS: list[dict[str, Any]] = [
    {},
    {"is_chat": True},
    {"n": 3, "stream_options": CONTINUOUS},
    {"n": 2, "stream_options": {"include_usage": True}, "echo": True},
    {"logprobs": 1, "n": 2, "stream_options": CONTINUOUS},
    {"is_chat": True, "n": 2, "stream_options": CONTINUOUS, "stop": ["cat"]},
    {"prompt": [[5], [6, 7]], "stream_options": CONTINUOUS},
    {"prompt": [[5], [6, 7]], "stop": ["t the", "éé"], "include_stop_str_in_output": True},
    {"stop": ["th", "\n"], "logprobs": 0, "return_token_ids": True, "n": 2},
    {"logprobs": 0, "n": 2},
    {"is_chat": True, "logprobs": 0, "n": 2},
    {"logprobs": WIDTH, "n": 2, "stop": ["e\n"]},
    {"logprobs": 2, "return_tokens_as_token_ids": True, "echo": True, "prompt": [5, 6]},
    {"is_chat": True, "logprobs": 3, "return_tokens_as_token_ids": True},
    {"is_chat": True, "logprobs": WIDTH, "n": 3},
    {"logprobs": 1, "return_packed": True},
    {"logprobs": 2, "n": 17},
    {"stream_interval": 3, "n": 2},
    {"return_packed": True, "logprobs": 0},
    {"skip_special_tokens": False, "n": 2},
    {"is_chat": True, "stop": ["cat"], "n": 4, "return_token_ids": True},
    {"n": 17},
    {"n": 17, "stop_token_ids": [MAT, CAT]},
    {"n": 2, "stop_token_ids": [MAT, CAT]},
]


TokenIds = dict[tuple[int, int], list[int]]


async def read_all_text(
    text: Text, fields: dict[str, Any], rng: random.Random, is_direct: bool
) -> tuple[Served, Reply, TokenIds]:
    """A stream whose tokens come at any time, and whose client pauses; and its tokens."""
    served = Served(text, is_direct)
    reply, task = await served.ask(**fields)
    version, reason = 1, STOP if "stop_token_ids" in fields else LENGTH
    keys = [(p, i) for p in range(len(served.heard)) for i in range(fields.get("n", 1))]
    entries: TokenIds = {key: [] for key in keys}
    left = {key: rng.randint(1, 25) for key in keys}
    while left:
        spoken = [key for key in left if rng.random() < 0.8]
        tokens = {
            key: rng.choice([THE, CAT, MAT, CUT, REST, NEWLINE, SPECIAL, rng.randrange(320)])
            for key in spoken
        }
        ends = {key for key in spoken if left[key] == 1}
        version += rng.random() < 0.03
        is_last = rng.random() < 0.6
        served.say(tokens, ends, version, reason, is_last)
        for key, token in tokens.items():
            entries[key].append(token)
        left = {key: count - (key in tokens) for key, count in left.items() if key not in ends}
        chance, is_slow, num_turns = rng.random(), rng.random() < 0.1, rng.choice([0, 0, 1, 12])
        if not is_last:
            continue
        if chance < 0.1 and is_direct:
            reply.pause() if is_slow else reply.resume()
        await turns(num_turns)
    served.client.streams.settle()
    reply.resume()
    await asyncio.wait_for(task, 60)
    return served, reply, entries


def choices_of(reply: Reply) -> list[dict[str, Any]]:
    count = 1 + max(choice["index"] for event in reply.events for choice in event["choices"])
    return [joined(parts_of(reply.events, index)) for index in range(count)]


def check_texts(text: Text, reply: Reply, fields: dict[str, Any], message: TokenIds) -> None:
    """What is read adds up to the text of all tokens, but for one that stopped it."""
    table, stop_ids = text.table(not fields.get("skip_special_tokens", True)), [MAT, CAT]
    echoed = fields.get("prompt", [5]) if "echo" in fields else []
    for index, (choice, ids) in enumerate(zip(choices_of(reply), message.values(), strict=True)):
        is_stop = "stop_token_ids" in fields
        whole = table.join(np.array([*echoed, *ids[: len(ids) - is_stop]], "<i4").tobytes())
        result = choice["delta"]["content"] if "delta" in choice else choice["text"]
        assert result == whole.decode(errors="replace")
        reason = ids[-1] if is_stop and ids[-1] in stop_ids else None
        assert choice["finish_reason"] == ("stop" if is_stop else "length")
        assert choice["stop_reason"] == reason
        if fields.keys() <= {"n", "stop_token_ids"}:
            parts = parts_of(reply.events, index)
            assert all(part["finish_reason"] is None and part["text"] for part in parts[:-1])
            plain = Choice(index=0, text="", finish_reason=None, stop_reason=None)
            assert all([*part] == [*msgspec.to_builtins(plain)] for part in parts)


@settings(max_examples=100)
@given(st.sampled_from(FIELDS), st.integers(0, 2**32))
def test_events_say_the_same_by_either_way(text: Text, fields: dict[str, Any], seed: int) -> None:
    one, other = (
        asyncio.run(read_all_text(text, fields, random.Random(seed), is_direct))
        for is_direct in (True, False)
    )
    if not {"stop", "return_packed"} & fields.keys():
        check_texts(text, one[1], fields, one[2])
    assert choices_of(one[1]) == choices_of(other[1])
    assert one[1].events[-1].get("usage") == other[1].events[-1].get("usage")
    assert one[0].tokens == other[0].tokens
    usages = [event["usage"] for event in one[1].events if event.get("usage")]
    counts = [usage["completion_tokens"] for usage in usages]
    prompt = {usage["total_tokens"] - usage["completion_tokens"] for usage in usages}
    assert counts == sorted(counts) and len(prompt) == bool(usages)
