"""Which of several servers answers a line, and what follows where one does not."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from srm.engine.client.client import EngineClient
from srm.server.batch import fleet, remote_worker
from srm.server.batch.engine_retry import EngineRetry
from srm.server.batch.fleet import Fleet
from srm.server.batch.lines import BatchLine
from srm.server.batch.remote_worker import FIRST_ROOM, MAX_LINE_BYTES, RemoteWorker
from srm.server.config import ServerConfig
from srm.server.generation.engine_request import RequestOwner
from srm.server.http.auth import Auth
from srm.server.http.draining import Draining
from srm.server.http.keys import Keys
from srm.server.http.request_middleware import RequestMiddleware
from srm.server.wiring import ServerWiring
from tests.attack.lying_worker import reply
from tests.kit.engines.served_engine import until

OWNER = RequestOwner("batch:a", 1.0, -5, True, 7)
IDENTITY = {"weights": "a", "served_model_name": "tiny"}
N_CTX = 64
BODY = b'{"prompt":"a"}'


def line(number: int, size: int = 1, body: bytes = BODY) -> BatchLine:
    return BatchLine(number, f"line {number}", "POST", "/v1/completions", body, size)


def make_reply(number: int) -> bytes:
    return json.dumps(reply(f"a-{number}")).encode()


class Here:
    """Answers lines as this server's engine does, when it may."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.asked: list[str] = []
        self.answer = b"here"

    async def answer_whole(self, body: bytes, id: str, owner: RequestOwner) -> bytes:
        self.asked.append(id)
        await self.may_answer.wait()
        return self.answer


async def sent(message: Any) -> AsyncIterator[bytes]:
    """As it comes from a connection."""
    yield json.dumps(message).encode()


class There:
    """Another server, as the client of HTTP meets it."""

    def __init__(self) -> None:
        self.instance = "there"
        self.identity = IDENTITY
        self.running, self.num_slots = 0, 4
        self.refuses: Callable[[str], dict[str, Any] | None] = lambda _: None
        self.breaks_off = False
        self.body: Any = None
        self.is_mute = self.is_late = False
        self.posts = 0
        self.status = 200
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.asked: list[list[str]] = []
        """Ids of the lines of each request."""
        self.left = 0

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        if self.status == 0:
            raise httpx.ConnectError("refused")
        if self.is_late:
            await asyncio.sleep(0.05)
        self.posts += request.method == "POST"
        if self.is_mute:
            await asyncio.Event().wait()
        if self.status != 200:
            return httpx.Response(self.status, content=sent({"error": {"message": "no"}}))
        if request.method == "GET":
            sizes = {
                "num_slots": self.num_slots,
                "max_waiting": 2 * self.num_slots,
                "running": self.running,
                "waiting": 0,
            }
            entries = {"instance": self.instance, "identity": self.identity, **sizes}
            return httpx.Response(200, content=sent(entries))
        asked = json.loads(request.content)
        assert asked["identity"] == IDENTITY and asked["created_unix"] == 7
        self.asked.append([load["id"] for load in asked["lines"]])
        return httpx.Response(200, content=self._events(self.asked[-1]))

    async def _events(self, ids: list[str]) -> AsyncIterator[bytes]:
        yield b"data: {}\n\n"
        try:
            await self.may_answer.wait()
        except asyncio.CancelledError:
            self.left += 1
            raise
        for id in ids:
            if self.breaks_off:
                break
            error = self.refuses(id)
            answer = (
                {"id": id, "refusal": {"id": id, **error}}
                if error
                else {"id": id, "body": reply(id) if self.body is None else self.body}
            )
            event = f"data: {json.dumps(answer)}\n\n".encode()
            for start in range(0, len(event), 9 if len(event) < 999 else 9_999):
                yield event[start : start + (9 if len(event) < 999 else 9_999)]
        yield b"data: [DONE]\n\n"


async def until_all_ended() -> None:
    """Until the test has no other task."""
    await until(lambda: asyncio.all_tasks() == {asyncio.current_task()})


class Place:
    """A fleet of this server, with room for two, and others."""

    def __init__(self, *others: There) -> None:
        client = SimpleNamespace(status=SimpleNamespace(state="ready"), losses=0, is_closed=False)
        self.here, self.client = Here(), client
        self.fleet = Fleet({"/v1/completions": self.here}, EngineRetry(cast(EngineClient, client)))
        self.fleet.own.room = 2
        for number, other in enumerate(others):
            address = f"http://10.0.0.{number}"
            http = httpx.AsyncClient(transport=httpx.MockTransport(other))
            self.fleet.workers[address] = RemoteWorker(http, address, httpx.URL(address))

    async def look(self) -> None:
        await self.fleet.look(IDENTITY, N_CTX, "", "here")

    async def answer(self, asked: BatchLine) -> Any:
        async def ask(answerers: Any) -> Any:
            return await answerers[asked.url].answer_whole(asked.body, f"a-{asked.number}", OWNER)

        async with asyncio.timeout(120):
            return await self.fleet.answer(asked, cast(Any, ask))


async def test_all_places_fill_evenly_and_lines_share_requests() -> None:
    one, two = There(), There()
    two.instance, two.running = "two", 4  # of others: half as much room
    place = Place(one, two)
    await place.look()
    assert place.fleet.room == 2 + 8 + 4
    for server in (place.here, one, two):
        server.may_answer.clear()
    tasks = [asyncio.create_task(place.answer(line(number))) for number in range(20)]
    await until(lambda: bool(one.asked and two.asked))
    assert (len(place.here.asked), *map(len, one.asked + two.asked)) == (2, 8, 4)
    for server in (place.here, one, two):
        server.may_answer.set()
    answers = await asyncio.gather(*tasks)
    assert all(answer in (b"here", make_reply(number)) for number, answer in enumerate(answers))
    assert sorted(chain(place.here.asked, *one.asked, *two.asked)) == sorted(
        f"a-{number}" for number in range(20)
    )
    assert [place.fleet.own.used, *(worker.used for worker in place.fleet.workers.values())] == [
        0,
        0,
        0,
    ]


async def test_a_server_is_given_more_as_it_answers_more_whatever_it_says(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that said it had 16 million slots kept all lines, beside an idle engine."""
    other = There()
    other.num_slots = 2**20
    place = Place(other)
    (worker,) = place.fleet.workers.values()
    await place.look()
    assert worker.room == FIRST_ROOM
    other.may_answer.clear()
    place.here.may_answer.clear()
    tasks = [asyncio.create_task(place.answer(line(number))) for number in range(300)]
    await until(lambda: sum(map(len, other.asked)) == FIRST_ROOM)
    monkeypatch.setattr(remote_worker, "SILENT_S", -1.0)
    await place.look()
    assert "has answered nothing for" in caplog.text
    other.may_answer.set()
    place.here.may_answer.set()
    await asyncio.gather(*tasks)
    await place.look()
    assert worker.room > FIRST_ROOM + 100
    other.breaks_off = True
    place.fleet.own.used = 1
    await place.answer(line(1))
    await place.look()
    assert worker.room == FIRST_ROOM


async def test_who_says_late_that_it_is_full_has_lost_the_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fleet, "LATE_S", -1.0)
    other, another = There(), There()
    another.instance = "another"
    other.refuses = another.refuses = lambda _: OVERLOADED
    place = Place(other, another)
    await place.look()
    place.fleet.own.used = 2  # nobody else has room
    asked = asyncio.create_task(place.answer(line(1)))
    await until(lambda: len(other.asked) + len(another.asked) == 2)
    place.fleet.own.used = 0
    await place.look()
    assert await asked == b"here" and len(other.asked) + len(another.asked) == 2


OVERLOADED = {"code": "overloaded", "message": "full", "retry_after_s": 9}
LOST = {"code": "engine_unavailable", "message": "it died"}
IN_USE = {"code": "id_in_use", "message": "it runs"}


@pytest.mark.parametrize(
    ("setting", "most_asked"),
    [
        ({"refuses": lambda _: OVERLOADED}, 1),
        ({"refuses": lambda _: LOST}, 2),
        ({"refuses": lambda _: IN_USE}, 1),
        ({"breaks_off": True}, 1),
        ({"status": 503}, 0),
        ({"status": 0}, 0),
    ],
    ids=["full", "dies of it", "id in use", "breaks off", "refuses", "is gone"],
)
async def test_a_line_that_another_server_does_not_answer_is_answered_here(
    setting: dict[str, Any], most_asked: int
) -> None:
    """At once, or after it has been the end of two."""
    other = There()
    place = Place(other)
    await place.look()
    for name, value in setting.items():
        setattr(other, name, value)
    place.fleet.own.used = 1  # so that the other one has more room
    assert await place.answer(line(1)) == b"here"
    assert len(other.asked) == most_asked
    assert place.fleet.own.used == 1


@pytest.mark.parametrize(
    "code",
    ["invalid_request", "body_too_large", "request_timeout", "not_found", "model_not_found",
     "quota_exceeded", "body_too_slow", "rate_limit_exceeded", "step_failed", "none of ours"],
)  # fmt: skip
async def test_what_another_server_refuses_is_answered_here(code: str) -> None:
    """Its limits are its own: a line was refused for good by a server that takes shorter bodies."""
    other = There()
    other.refuses = lambda _: {"code": code, "message": "no", "param": "n"}
    place = Place(other)
    await place.look()
    place.fleet.own.used = 1
    assert await place.answer(line(1)) == b"here"
    assert len(other.asked) == 1


@pytest.mark.parametrize(
    "asked",
    [line(1, size=3), line(1, body=b" " * (MAX_LINE_BYTES + 1)), line(1, body=b"\xff")],
    ids=["more samples than room", "a long body", "a body that is no text"],
)
async def test_some_lines_stay_here(asked: BatchLine) -> None:
    place = Place(There())
    await place.look()
    place.fleet.own.used = 1 if asked.size == 1 else 0
    assert await place.answer(asked) == b"here"


async def test_while_this_engine_is_away_others_have_the_lines() -> None:
    place = Place(There())
    await place.look()
    place.client.status = None
    assert await asyncio.gather(*(place.answer(line(number)) for number in range(9))) == [
        *map(make_reply, range(9))
    ]


async def test_what_nobody_waits_for_any_more_is_ended_there() -> None:
    other = There()
    other.may_answer.clear()
    place = Place(other)
    await place.look()
    place.fleet.own.used = 2
    tasks = [asyncio.create_task(place.answer(line(number))) for number in range(3)]
    await until(lambda: bool(other.asked))
    for left, task in zip((0, 0, 1), tasks, strict=True):
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: other.left == left)  # noqa: B023
    await until_all_ended()


async def test_what_is_cancelled_before_it_is_sent_is_not_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop, sends = asyncio.get_running_loop(), list[Callable[[], None]]()
    call_later = loop.call_later

    def hold(delay_s: float, call: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
        if delay_s == 3_600:
            return sends.append(call)
        return call_later(delay_s, call, *arguments, **more)

    monkeypatch.setattr(loop, "call_later", hold)
    monkeypatch.setattr(remote_worker, "_GATHER_S", 3_600)
    other = There()
    place = Place(other)
    await place.look()
    place.fleet.own.used = 2
    (worker,) = place.fleet.workers.values()
    tasks = [asyncio.create_task(place.answer(line(number))) for number in range(2)]
    await until(lambda: worker.used == 2)
    tasks[0].cancel()
    await asyncio.gather(tasks[0], return_exceptions=True)
    (send,) = sends
    send()
    assert await tasks[1] == make_reply(1) and other.asked == [["a-1"]]


async def test_an_answer_without_end_is_one_of_a_lost_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote_worker, "MAX_HELD_BYTES", 1_000)
    other = There()
    other.body = "x" * 100_000
    place = Place(other)
    await place.look()
    place.fleet.own.used = 1
    assert await place.answer(line(1)) == b"here" and other.posts == 1


async def test_a_name_whose_server_is_silent_keeps_no_other_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def getaddrinfo(host: str, *_: object, **__: object) -> list[Any]:
        if host == "silent":
            await asyncio.Event().wait()
        return [(0, 0, 0, "", ("10.0.0.9", 81))]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo, raising=False)
    monkeypatch.setattr(fleet, "_RESOLVE_S", 0.05)
    place = Place()
    async with asyncio.timeout(60):
        await place.fleet.find(("http://silent:80", "http://other:81"), httpx.AsyncClient())
    assert list(place.fleet.workers) == ["http://10.0.0.9:81"]


async def test_servers_that_are_another_or_this_one_get_no_lines() -> None:
    same, twin, unlike, itself = There(), There(), There(), There()
    unlike.instance, unlike.identity = "unlike", {"weights": "b"}
    itself.instance = "here"
    place = Place(same, twin, unlike, itself)
    await place.look()
    assert [worker.room for worker in place.fleet.workers.values()] == [8, 0, 0, 0]


async def test_what_is_too_long_for_a_server_is_sent_there_once() -> None:
    """Also where this engine has no room meanwhile."""
    other = There()
    place = Place(other)
    await place.look()
    other.status, place.fleet.own.used = 413, 2
    task = asyncio.create_task(place.answer(line(1)))
    (worker,) = place.fleet.workers.values()
    for _ in range(9):
        await until(lambda: not worker.used)
        other.status = 200  # to a look
        await place.look()
        assert worker.room == 8
        other.status = 413
        await asyncio.sleep(0.01)
    assert other.posts == 1 and not task.done()
    place.fleet.own.used = 0
    await place.look()
    assert await task == b"here"


async def test_a_long_answer_takes_time_in_proportion() -> None:
    other = There()
    one = {"text": "x" * 100_000, "finish_reason": "length"}
    other.body = reply("a-1", choices=[{"index": index, **one} for index in range(200)])
    place = Place(other)
    await place.look()
    place.fleet.own.used = 1
    began = time.process_time()
    asked = line(1, body=b'{"prompt":"a","n":200,"max_tokens":64}')
    assert len(await place.answer(asked)) > 20_000_000
    assert time.process_time() - began < 10


async def test_a_server_that_says_nothing_keeps_no_other_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote_worker, "_LOOK_S", 0.05)
    other = There()
    other.is_mute = True
    place = Place(other)
    async with asyncio.timeout(60):
        await place.look()
    assert [worker.room for worker in place.fleet.workers.values()] == [0]


@pytest.mark.parametrize("host", ["a..b", "a" * 64])
async def test_a_name_that_cannot_be_encoded_is_one_that_cannot_be_resolved(host: str) -> None:
    place = Place()
    await place.fleet.find((f"http://{host}:80",), httpx.AsyncClient())
    assert not place.fleet.workers
    with pytest.raises(ValueError, match="batch_workers must be URLs"):
        ServerConfig(model=Path("m"), batch_workers=(f"http://{host}:80",))


async def test_of_two_addresses_of_one_server_the_first_stays_in_use() -> None:
    one, two = There(), There()
    two.is_late = True
    place = Place(one, two)
    for _ in range(2):
        await place.look()
        assert [worker.room for worker in place.fleet.workers.values()] == [8, 0]
        one.is_late, two.is_late = True, False
    one.status = 0
    await place.look()
    await place.look()
    assert [worker.room for worker in place.fleet.workers.values()] == [0, 8]


async def test_a_worker_without_keys_that_is_asked_by_a_name_says_where_to_name_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """By a service's name, say; its own log says nothing of it, so the owner's must."""
    asked: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        asked.append(scope["path"])
        await Response("{}")(scope, receive, send)

    for named in ((), ("srm-workers",)):
        config = ServerWiring(host="0.0.0.0", allowed_hosts=named)
        guard = RequestMiddleware(Auth(app, config, Keys([]), lambda: 1, Draining()))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(guard)) as http:
            url = httpx.URL("http://srm-workers:8000")
            await RemoteWorker(http, "http://10.0.0.2:8000", url).look(IDENTITY, 64, "", {})
        assert asked == ["/v1/worker"] * len(named)
    refused, _ = caplog.messages
    assert "is sent no lines of batches: 403" in refused and "'srm-workers:8000'" in refused
    assert "--allowed-hosts" in refused
