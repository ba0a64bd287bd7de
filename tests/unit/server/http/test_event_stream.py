"""How a stream of events ends."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from srm.server.http.responses import EventStream, frame


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
