"""A server that sends any bytes: what a client makes of them is the test's business.

Each connection is handled by a coroutine of the test, which reads requests and writes as it likes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

Handler = Callable[["Peer"], Awaitable[None]]


class Peer:
    """One connection, as its server has it. `number` counts them from 0."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int = 0
    ) -> None:
        self.number = number
        self._reader, self._writer = reader, writer
        self.close, self.abort = writer.close, writer.transport.abort

    async def request(self) -> bytes | None:
        """The body of the next request, whose head `head` then is; None once the client closed."""
        try:
            self.head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            length = re.search(r"\r\ncontent-length: *(\d+)", self.head, re.IGNORECASE)
            return await self._reader.readexactly(int(length[1]) if length else 0)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    async def send(self, data: bytes) -> None:
        """Raises ConnectionError once the client has closed."""
        self._writer.write(data)
        await self._writer.drain()

    async def answer_all(self, *replies: bytes) -> None:
        """One reply after the other, the last to all further requests, until the client closes."""
        left = list(replies)
        while await self.request() is not None:
            await self.send(left.pop(0) if len(left) > 1 else left[0])


def answering(*replies: bytes) -> Handler:
    return lambda peer: peer.answer_all(*replies)


class RawServer:
    """What it has seen."""

    url = ""
    port = 0
    connections = 0
    open = 0


@asynccontextmanager
async def raw_server(handler: Handler) -> AsyncIterator[RawServer]:
    """Listens on a free port until the block ends; fails if a handler failed."""
    seen = RawServer()
    tasks: list[asyncio.Task[None]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.append(asyncio.current_task())  # type: ignore[arg-type]  # a task runs this
        seen.connections += 1
        seen.open += 1
        try:
            with contextlib.suppress(ConnectionError):
                await handler(Peer(reader, writer, seen.connections - 1))
        finally:
            seen.open -= 1
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, backlog=1024)
    seen.port = server.sockets[0].getsockname()[1]
    seen.url = f"http://127.0.0.1:{seen.port}"
    try:
        yield seen
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(ended, Exception):
                raise ended


def event(**fields: Any) -> bytes:
    return b"data: %b\n\n" % json.dumps(fields).encode()


def text_event(text: str, index: int = 0, **fields: Any) -> bytes:
    return event(choices=[{"index": index, "text": text, **fields}])


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
DONE = b"data: [DONE]\n\n"
END = b"0\r\n\r\n"


def stream(*events: bytes) -> bytes:
    """A whole reply: each of these in a chunk of its own."""
    return HEAD + b"".join(map(chunk, events)) + END


def make_reply(body: bytes, status: int = 200, *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status} X", f"content-length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body
