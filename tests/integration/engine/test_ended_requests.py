"""Requests that are refused, take too long, or end whatever they wait for: no slot stays taken and
nothing goes on waiting.

The application is run without a socket, on a real engine process in a thread, so that its tasks'
every step can be counted: at each one in turn the client leaves, or the request is cancelled.
"""

from __future__ import annotations

import asyncio
import json
import threading
import types
from collections.abc import Callable, Coroutine, Generator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from srm.engine.client.client import EngineClient
from srm.engine.constraints.grammars import Grammars
from srm.errors import InvalidRequest, Overloaded, TimedOut
from tests.conftest import MakeEngine, MakeRequest
from tests.kit.engines.served_app import Visit, application
from tests.kit.engines.served_engine import NUM_SLOTS, Serve, collect, connected, until
from tests.kit.processes.held_engine import HeldEngine, held

REQUESTS: list[dict[str, Any]] = [
    {"prompt": [5, 6, 7], "n": 12, "max_tokens": 3},
    {"prompt": [[5, 6], [9, 8, 7]], "n": 3, "max_tokens": 3, "stream": True},
    {"prompt": [5, 6, 7], "n": 3, "max_tokens": 4, "logprobs": 2, "echo": True},
    {"prompt": [[5, 6, 7], [8, 8]], "max_tokens": 0, "echo": True, "logprobs": 1},
]


class Steps:
    """Counts the steps of every task started while it is installed; acts at one of them."""

    def __init__(self, at: int, act: Callable[[], None]) -> None:
        self.count = 0
        self._at = at
        self._act = act

    def factory(
        self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any], **how: Any
    ) -> asyncio.Task[Any]:
        async def counted() -> Any:
            return await self._stepped(coroutine)

        return asyncio.Task(counted(), loop=loop, **how)

    @types.coroutine
    def _stepped(self, coroutine: Coroutine[Any, Any, Any]) -> Generator[Any, Any, Any]:
        go_on, given = coroutine.send, None
        while True:
            self.count += 1
            if self.count == self._at:
                self._act()
            try:
                waited = go_on(given)
            except StopIteration as done:
                return done.value
            try:
                go_on, given = coroutine.send, (yield waited)
            except BaseException as thrown:  # noqa: BLE001  # handed on to whose it is
                go_on, given = coroutine.throw, thrown


async def ask(
    app: FastAPI, request: dict[str, Any], at: int, how: str
) -> tuple[int, list[dict[str, Any]]]:
    """Send a request that ends at a step; how many steps there were, and what was sent."""

    def act() -> None:
        if how == "leaves":
            visit.leave()
        else:
            visit.task.cancel()

    loop = asyncio.get_running_loop()
    steps = Steps(at, act)
    loop.set_task_factory(steps.factory)  # type: ignore[arg-type]  # any awaitable would do
    try:
        visit = Visit(app, request, [])
        await visit.end()
    finally:
        loop.set_task_factory(None)
    return steps.count, visit.sent


async def check_nothing_is_left(served: Any, client: EngineClient) -> None:
    scheduler = served.engine.scheduler
    await until(lambda: scheduler.num_requests == 0)

    def is_idle() -> bool:
        status = client.status
        return status is not None and (status.running, status.waiting) == (0, 0)

    await until(is_idle)
    assert scheduler.table.num_free == NUM_SLOTS
    assert scheduler.waiting_bytes == 0


@pytest.mark.parametrize("how", ["leaves", "is cancelled"])
@pytest.mark.parametrize("request_number", range(len(REQUESTS)))
async def test_a_request_may_end_at_any_step(
    serve: Serve, endpoint: str, tiny_folder: Path, request_number: int, how: str
) -> None:
    served, request = serve(), REQUESTS[request_number]
    async with application(endpoint, tiny_folder) as (app, client):
        steps, sent = await ask(app, request, -1, how)
        assert sent[0]["status"] == 200
        assert not sent[-1].get("more_body")
        for at in {*range(1, min(steps, 30)), *range(30, steps, 16)}:
            _, sent = await ask(app, request, at, how)
            assert not sent or sent[0]["status"] in {200, 503}
        await check_nothing_is_left(served, client)
        assert (await ask(app, request, -1, how))[1][0]["status"] == 200


async def test_a_retry_of_what_timed_out_starts_anew_and_a_seed_makes_the_same_of_it(
    serve: Serve, endpoint: str, tiny_folder: Path
) -> None:
    request = REQUESTS[0]
    scheduler = serve(make_engine=HeldEngine, model=tiny_folder).engine.scheduler
    async with application(endpoint, tiny_folder) as (app, _):
        with held(tiny_folder):
            patience = b"x-stainless-read-timeout"
            first = Visit(app, request, [(patience, b"1e-6")])
            await until(lambda: scheduler.table.num_owned > 0)
            first.leave()
            await first.end()
            assert not first.sent
            retry = Visit(app, request, [(patience, b"9"), (b"x-stainless-retry-count", b"1")])
            await until(lambda: scheduler.num_left > request["n"])
        replies = [await retry.reply(), await Visit(app, request, []).reply()]
        assert scheduler.num_left == 3 * request["n"]
    retried, other = (json.loads(body) for status, body in replies if status == 200)
    assert retried["id"] != other["id"]
    assert retried["choices"] == other["choices"]


def test_waiting_requests_are_bounded_in_bytes(
    make_engine: MakeEngine, make_request: MakeRequest
) -> None:
    engine = make_engine(num_slots=2, max_waiting_bytes=20_000)
    with pytest.raises(Overloaded, match="20000 bytes"):
        for number in range(100):
            engine.add(make_request(str(number), max_tokens=3))
    accepted = engine.scheduler.num_requests
    assert 2 <= accepted < 12
    assert 0 < engine.scheduler.waiting_bytes <= 20_000
    for number in range(accepted):
        engine.abort(str(number))
    assert engine.scheduler.waiting_bytes == 0
    engine.add(make_request("again", n=5, max_tokens=3))
    while engine.has_work:
        engine.step()
    assert engine.scheduler.waiting_bytes == 0

    engine.add(make_request("scored", max_tokens=0, prompt_logprobs=1))
    assert engine.scheduler.waiting_bytes > 0
    while engine.has_work:
        engine.step()
    assert engine.scheduler.waiting_bytes == engine.scheduler.num_waiting == 0


def test_one_request_that_waits_alone_always_has_room(
    make_engine: MakeEngine, make_request: MakeRequest
) -> None:
    engine = make_engine(max_waiting_bytes=1)
    engine.add(make_request("a", n=50))
    with pytest.raises(Overloaded):
        engine.add(make_request("b"))


async def test_what_takes_too_long_is_ended(
    serve: Serve, endpoint: str, make_request: MakeRequest
) -> None:
    served = serve(max_waiting=5_000, request_timeout_s=0.3)
    async with connected(endpoint, heartbeat_s=0.05) as client:
        with pytest.raises(TimedOut, match=r"0\.3 s"):
            await collect(client, make_request(n=5_000, max_tokens=60))
        assert len(await collect(client, make_request("b", max_tokens=2, durable=True))) == 1
        await until(lambda: served.engine.scheduler.num_requests == 0)


async def test_time_runs_while_a_constraint_is_compiled(
    serve: Serve, endpoint: str, make_request: MakeRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()

    def hang(*_: object) -> None:
        goes_on.wait()
        raise InvalidRequest("it hung", "constraint")

    monkeypatch.setattr(Grammars, "build", hang)
    served = serve(request_timeout_s=0.3)
    async with connected(endpoint, heartbeat_s=0.05) as client:
        with pytest.raises(TimedOut, match=r"0\.3 s"):
            await collect(client, make_request("a", constraint="{}"))
        late = asyncio.ensure_future(
            collect(client, make_request("b", constraint="{}", durable=True))
        )
        assert len(await collect(client, make_request("c", max_tokens=2))) == 1
        goes_on.set()
        with pytest.raises(InvalidRequest, match="it hung"):
            await late
    assert not served.engine.scheduler.num_requests


async def test_a_late_request_is_a_504_and_its_stream_an_error(
    serve: Serve, endpoint: str, tiny_folder: Path
) -> None:
    body = {"prompt": [5], "max_tokens": 60}
    # A stream must begin before it is over.
    served = serve(make_engine=HeldEngine, model=tiny_folder, request_timeout_s=2)
    async with application(endpoint, tiny_folder) as (app, _):
        with held(tiny_folder):
            late = Visit(app, body, [])
            status, error = await late.reply()
            assert status == 504 and b'"request_timeout"' in error
            assert (b"x-should-retry", b"false") in late.sent[0]["headers"]
            status, events = await Visit(app, body | {"stream": True}, []).reply()
            *_, last, done, rest = events.split(b"\n\n")
            assert status == 200 and b'"request_timeout"' in last
            assert (done, rest) == (b"data: [DONE]", b"")
        await until(lambda: not served.engine.scheduler.num_requests)
