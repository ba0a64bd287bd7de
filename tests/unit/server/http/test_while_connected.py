"""A reply that is made while its client waits: what ends it, and what is said of that."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from srm.server.errors import BodyTooLarge
from srm.server.http.responses import WhileConnected

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
