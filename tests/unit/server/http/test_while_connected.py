"""Replies whose clients stay or leave: what ends them, and who writes to the connection."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from srm.server.errors import BodyTooLarge
from srm.server.http.connection import Connection, offer
from srm.server.http.responses import CONNECT, EventStream, WhileConnected, frame

SCOPE = {"type": "http"}


class Work:
    """A reply that is never made, and takes a moment to be given up."""

    def __init__(self) -> None:
        self.is_given_up = False

    async def make(self) -> Response:
        try:
            await asyncio.Event().wait()
        finally:
            for _ in range(5):
                await asyncio.sleep(0)
            self.is_given_up = True
        raise AssertionError("nothing sets it")


async def send(_message: Any) -> None:
    raise AssertionError("there is nothing to send")


async def soon() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_loop_that_ends_all_tasks_is_no_client_that_leaves() -> None:
    """As `asyncio.run` does with what a stopped server leaves behind: what is given up may take its
    time, and the request's task counts as cancelled."""

    async def receive() -> Any:
        await asyncio.Event().wait()

    work, others = Work(), asyncio.all_tasks()
    task = asyncio.create_task(WhileConnected(work.make)(SCOPE, receive, send))
    await soon()
    both = asyncio.all_tasks() - others
    assert len(both) == 2
    for item in sorted(both, key=lambda one: one is task):  # who watches the client first
        item.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert work.is_given_up


async def test_a_client_that_leaves_ends_the_work() -> None:
    left = asyncio.Event()

    async def receive() -> Any:
        await left.wait()
        return {"type": "http.disconnect"}

    work = Work()
    task = asyncio.create_task(WhileConnected(work.make)(SCOPE, receive, send))
    await soon()
    left.set()
    with pytest.raises(ClientDisconnect):
        await task
    assert work.is_given_up


async def test_what_a_client_sends_too_much_of_meanwhile_is_refused() -> None:
    """Of a GET nobody reads the body first."""
    unseen: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(context))

    async def receive() -> Any:
        raise BodyTooLarge("the body is larger than 3 bytes")

    work = Work()
    with pytest.raises(BodyTooLarge):
        await WhileConnected(work.make)(SCOPE, receive, send)
    gc.collect()
    assert work.is_given_up and not unseen


async def test_a_client_that_has_left_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    """Behind a pipelined request, `send` alone says that it has."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)
        if message.get("body") == b"data: 2\n\n":
            raise ClientDisconnect

    async def events() -> AsyncGenerator[bytes, None]:
        yield frame([b"1"])
        yield frame([b"2"])

    async def receive() -> Any:
        raise AssertionError("nobody asks")

    with pytest.raises(ClientDisconnect):
        await EventStream(events())({"type": "http"}, receive, send)
    assert len(sent) == 3 and not caplog.records


class Gone:
    """A transport that is closed."""

    def write(self, data: bytes) -> None:
        raise RuntimeError("the handler is closed")


def connection(**fields: Any) -> Any:
    made = Connection.__new__(Connection)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def test_a_lost_connection_is_left_to_the_task() -> None:
    """Whose `send` raises: behind a pipelined request nothing else says that the client left."""
    assert not connection(transport=Gone()).write(b"5\r\nhello\r\n")


def test_only_a_reply_in_chunks_lends_its_connection() -> None:
    for is_chunked, is_gone in ((True, False), (False, False), (True, True)):
        cycle = SimpleNamespace(scope={})
        lender = connection(cycle=cycle)
        offer(lender)
        cycle.chunked_encoding, cycle.disconnected = is_chunked, is_gone
        outlet = SimpleNamespace(connection=None)
        cycle.scope["extensions"][CONNECT](outlet)
        assert (outlet.connection is lender) == (is_chunked and not is_gone)
