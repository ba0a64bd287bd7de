"""Whatever a request is waiting for when it ends: no slot stays taken and nothing goes on waiting.

The application is run without a socket, on a real engine process in a thread, so that its tasks'
every step can be counted: at each one in turn the client leaves, or the request is cancelled.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.client.client import EngineClient
from server.config import ServerConfig
from server.routes.app import create_app
from server.text.text import Text
from tests.engines.served_engine import NUM_SLOTS, Serve, until

SDK = [(b"x-stainless-read-timeout", b"600"), (b"x-stainless-retry-count", b"1")]
REQUESTS: list[dict[str, Any]] = [
    {"prompt": [5, 6, 7], "n": 12, "max_tokens": 3},
    {"prompt": [[5, 6], [9, 8, 7]], "n": 3, "max_tokens": 3, "stream": True},
    {"prompt": [5, 6, 7], "n": 3, "max_tokens": 4, "logprobs": 2, "echo": True},
    {"prompt": [[5, 6, 7], [8, 8]], "max_tokens": 0, "echo": True, "logprobs": 1},
]


class Client:
    """The two ends of an ASGI conversation; leaves after so many steps of the request's tasks."""

    def __init__(self, body: bytes) -> None:
        self._left = asyncio.Event()
        self._chunks = [body[: len(body) // 2], body[len(body) // 2 :]]
        self.sent: list[dict[str, Any]] = []

    def leave(self) -> None:
        self._left.set()

    async def receive(self) -> dict[str, Any]:
        await asyncio.sleep(0)
        if self._left.is_set() or not self._chunks:
            await self._left.wait()
            return {"type": "http.disconnect"}
        chunk = self._chunks.pop(0)
        return {"type": "http.request", "body": chunk, "more_body": bool(self._chunks)}

    async def send(self, message: dict[str, Any]) -> None:
        await asyncio.sleep(0)
        self.sent.append(message)


class Steps:
    """Counts the steps of every task started while it is installed; acts at one of them."""

    def __init__(self, at: int, act: Any) -> None:
        self.count = 0
        self._at = at
        self._act = act

    def factory(
        self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any], **how: Any
    ) -> asyncio.Task[Any]:
        return asyncio.Task(self._counted(coroutine), loop=loop, **how)

    async def _counted(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return await _Stepped(coroutine, self)

    def step(self) -> None:
        self.count += 1
        if self.count == self._at:
            self._act()


class _Stepped:
    """Awaits a coroutine, and says so each time it goes on."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], steps: Steps) -> None:
        self._coroutine = coroutine
        self._steps = steps

    def __await__(self) -> Any:
        value, error = None, None
        while True:
            self._steps.step()
            try:
                if error is None:
                    waited = self._coroutine.send(value)
                else:
                    waited = self._coroutine.throw(error)
            except StopIteration as done:
                return done.value
            value, error = None, None
            try:
                value = yield waited
            except BaseException as thrown:  # noqa: BLE001  # handed on to whose it is
                error = thrown


@asynccontextmanager
async def application(endpoint: str, model: Path) -> AsyncIterator[tuple[FastAPI, EngineClient]]:
    client = EngineClient(endpoint, heartbeat_s=0.01)
    text = Text(model)
    app = create_app(ServerConfig(model=model), client, text)
    async with app.router.lifespan_context(app):
        await client.wait_until_ready(120)
        yield app, client


async def ask(
    app: FastAPI, request: dict[str, Any], headers: list[tuple[bytes, bytes]], at: int, how: str
) -> tuple[int, list[dict[str, Any]]]:
    """Send a request that ends at a step; how many steps there were, and what was sent."""
    client = Client(json.dumps({"ignore_eos": True, "seed": 1} | request).encode())
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "raw_path": b"/v1/completions",
        "query_string": b"",
        "headers": headers,
        "server": ("srm", 80),
        "client": ("there", 1),
        "http_version": "1.1",
        "scheme": "http",
        "root_path": "",
        "state": {},
    }

    def act() -> None:
        if how == "leaves":
            client.leave()
        else:
            task.cancel()

    loop = asyncio.get_running_loop()
    steps = Steps(at, act)
    loop.set_task_factory(steps.factory)  # type: ignore[arg-type]  # any awaitable would do
    try:
        task = loop.create_task(app(scope, client.receive, client.send))  # type: ignore[arg-type]  # dicts are messages
    finally:
        await asyncio.sleep(0)
    try:
        async with asyncio.timeout(120):
            await asyncio.gather(task, return_exceptions=True)
    finally:
        loop.set_task_factory(None)
    return steps.count, client.sent


async def check_nothing_is_left(served: Any, client: EngineClient) -> None:
    scheduler = served.engine.scheduler
    await until(lambda: scheduler.num_requests == 0)
    await until(
        lambda: (
            client.status is not None and (client.status.running, client.status.waiting) == (0, 0)
        )
    )
    assert scheduler.table.num_free == NUM_SLOTS
    assert scheduler.waiting_bytes == 0


@pytest.mark.parametrize("how", ["leaves", "is cancelled"])
@pytest.mark.parametrize(
    ("request_number", "headers"),
    [*((number, []) for number in range(len(REQUESTS))), (0, SDK), (1, SDK)],
)
async def test_a_request_may_end_at_any_step(
    serve: Serve,
    endpoint: str,
    tiny_folder: Path,
    request_number: int,
    headers: list[tuple[bytes, bytes]],
    how: str,
) -> None:
    served = serve()
    request = REQUESTS[request_number]
    async with application(endpoint, tiny_folder) as (app, client):
        steps, sent = await ask(app, request, headers, -1, how)
        assert sent[0]["status"] == 200
        assert not sent[-1].get("more_body")
        for at in {*range(1, min(steps, 30)), *range(30, steps, 16)}:
            _, sent = await ask(app, request, headers, at, how)
            assert not sent or sent[0]["status"] in {200, 503}
        await check_nothing_is_left(served, client)
        assert (await ask(app, request, headers, -1, how))[1][0]["status"] == 200


async def test_many_that_end_at_random_steps_leave_nothing(
    serve: Serve, endpoint: str, tiny_folder: Path
) -> None:
    served = serve(max_waiting=1_000)
    async with application(endpoint, tiny_folder) as (app, client):

        @settings(max_examples=5, deadline=None)
        @given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 150), st.booleans())))
        def plan(drawn: list[tuple[int, int, bool]]) -> None:
            plans.append(drawn)

        plans: list[list[tuple[int, int, bool]]] = []
        await asyncio.to_thread(plan)
        for drawn in plans:
            for number, at, leaves in drawn:
                await ask(app, REQUESTS[number], [], at, "leaves" if leaves else "is cancelled")
            await check_nothing_is_left(served, client)
