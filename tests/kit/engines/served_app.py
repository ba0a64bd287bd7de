"""The application on an engine process in a thread, without a socket, and visits to it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from srm.engine.client.client import EngineClient
from srm.server.routes.app import create_app
from srm.server.text.text import Text
from srm.server.wiring import ServerWiring

Headers = list[tuple[bytes, bytes]]


@asynccontextmanager
async def application(
    endpoint: str, model: Path, **settings: Any
) -> AsyncIterator[tuple[FastAPI, EngineClient]]:
    """Once the engine is ready; settings as in ServerWiring."""
    client = EngineClient(endpoint, heartbeat_s=0.01)
    app = create_app(ServerWiring(model=model, **settings), client, Text(model))
    async with app.router.lifespan_context(app):
        await client.wait_until_ready(120)
        yield app, client


class Visit:
    """A completion request of a client that stays until it leaves."""

    def __init__(self, app: FastAPI, body: dict[str, Any], headers: Headers) -> None:
        content = json.dumps({"ignore_eos": True, "seed": 1} | body).encode()
        self._left = asyncio.Event()
        self._chunks = [content[: len(content) // 2], content[len(content) // 2 :]]
        self.sent: list[dict[str, Any]] = []
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
        coroutine: Any = app(scope, self._receive, self._send)  # type: ignore[arg-type]  # dicts are messages
        self.task: asyncio.Task[None] = asyncio.get_running_loop().create_task(coroutine)

    def leave(self) -> None:
        self._left.set()

    async def end(self) -> None:
        """Wait until nothing is done for it any more."""
        async with asyncio.timeout(120):
            await asyncio.gather(self.task, return_exceptions=True)

    async def reply(self) -> tuple[int, bytes]:
        """Status and body, which must be whole."""
        await self.end()
        assert self.sent and not self.sent[-1].get("more_body")
        return self.sent[0]["status"], b"".join(data.get("body", b"") for data in self.sent[1:])

    async def _receive(self) -> dict[str, Any]:
        await asyncio.sleep(0)
        if self._left.is_set() or not self._chunks:
            await self._left.wait()
            return {"type": "http.disconnect"}
        chunk = self._chunks.pop(0)
        return {"type": "http.request", "body": chunk, "more_body": bool(self._chunks)}

    async def _send(self, message: dict[str, Any]) -> None:
        await asyncio.sleep(0)
        self.sent.append(message)
