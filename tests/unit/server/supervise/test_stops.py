"""What is said of a stop, and of replies that it or an error breaks off."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from starlette.types import Message, Receive, Scope, Send

from srm.errors import EngineUnavailable
from srm.server.http.request_middleware import RequestMiddleware
from srm.server.http.responses import EventStream, frame
from srm.server.supervise.supervisor import Child, Supervisor
from tests.kit.engines.served_engine import until

GET: Scope = {"type": "http", "method": "GET", "path": "/", "headers": []}


class Streamed:
    """One event, then whatever happens."""

    def __init__(self, error: Exception | None) -> None:
        self._error = error
        self.sent: list[bytes] = []
        self.has_begun = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await EventStream(self._events())(scope, receive, send)

    async def _events(self) -> AsyncGenerator[bytes, None]:
        yield frame([b"{}"])
        yield frame([b"{}"])
        self.has_begun.set()
        if self._error is not None:
            raise self._error
        await asyncio.Event().wait()

    async def send(self, message: Message) -> None:
        self.sent.append(message.get("body", b""))


async def receive() -> Message:
    await asyncio.Event().wait()
    raise AssertionError


@pytest.mark.parametrize(
    ("error", "status"), [(None, 503), (EngineUnavailable("gone"), 503), (KeyError(), 500)]
)
async def test_a_stream_that_is_broken_off_is_not_logged_as_answered(
    error: Exception | None, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    streamed = Streamed(error)
    with caplog.at_level(logging.INFO, "srm.server.http.request_middleware"):
        task = asyncio.create_task(RequestMiddleware(streamed)(GET, receive, streamed.send))
        await streamed.has_begun.wait()
        if error is None:
            task.cancel()
        await task
    (fields,) = (
        vars(record)["fields"] for record in caplog.records if record.message == "answered"
    )
    assert fields["status"] == status
    assert b'"error":' in b"".join(streamed.sent)


async def test_a_stop_says_what_it_awaits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    program = (
        "import signal, sys, time; signal.signal(15, signal.SIG_IGN)\n"
        "open(sys.argv[1], 'w')\ntime.sleep(1000)"
    )
    command = [sys.executable, "-ISc", program]
    engine, api = (
        Child(name, [*command, str(tmp_path / name)], dict(os.environ))
        for name in ("engine", "api")
    )
    with caplog.at_level(logging.INFO):
        supervisor = Supervisor([engine], [api], 1000, 1000)
        running = asyncio.create_task(supervisor.run(lambda: asyncio.sleep(1000)))
        await until(lambda: (tmp_path / "engine").exists() and (tmp_path / "api").exists())
        os.kill(os.getpid(), signal.SIGINT)
        await until(
            lambda: "running requests have 1000 s to finish; a second signal stops" in caplog.text
        )
        os.kill(os.getpid(), signal.SIGINT)
        async with asyncio.timeout(120):
            assert await running == 0
