"""`python -m bench.server.load`: sends many requests at once over raw sockets, and counts replies.

The client's half of the HTTP benchmarks, in a process of its own: it counts bytes and events and
reads no JSON but the usage at the end, so that the server is what is measured. Takes a Load as JSON
on standard input and answers with a Result, or exits with the error on standard error.
"""

from __future__ import annotations

import asyncio
import re
import sys
import time
from typing import cast

import msgspec
import uvloop

_TAIL = 4096
"""Bytes at the end of a reply in which the usage is searched."""
_USAGE = re.compile(rb'"completion_tokens": ?(\d+)')

_HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    b"content-type: application/json\r\n"
)


class Load(msgspec.Struct):
    """Requests to send at once, each over a connection of its own."""

    host: str
    port: int
    bodies: list[msgspec.Raw]
    """Bodies of POST /v1/completions; streams must include their usage."""


class Result(msgspec.Struct):
    """Sums over all replies."""

    seconds: float
    """Seconds from the first request's first byte to the last reply's last."""
    tokens: int
    """Sum of the replies' usage."""
    num_bytes: int
    events: int
    """Events of streams, including each stream's last ones without a choice."""


class _Reply(asyncio.Protocol):
    """Sends one request and counts the reply until the server closes."""

    def __init__(self, body: bytes) -> None:
        self._request = b"%bcontent-length: %d\r\n\r\n%b" % (_HEAD, len(body), body)
        self.done = asyncio.get_running_loop().create_future()
        self.num_bytes = 0
        self.events = 0
        self._tail = b""
        self._head = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def begin(self) -> None:
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if not self.num_bytes:
            self._head = data[:16]
        self.num_bytes += len(data)
        self.events += data.count(b"data: {")
        self._tail = data[-_TAIL:] if len(data) >= _TAIL else (self._tail + data)[-_TAIL:]

    def connection_lost(self, error: Exception | None) -> None:
        if error is not None:
            self.done.set_exception(error)
        elif b" 200 " not in self._head:
            self.done.set_exception(RuntimeError(f"refused: {self._tail!r}"))
        else:
            self.done.set_result(None)

    @property
    def tokens(self) -> int:
        """The usage's completion tokens. Raises RuntimeError for a reply that was cut short."""
        found = _USAGE.findall(self._tail)
        if not found:
            raise RuntimeError(f"a reply without usage ends in {self._tail!r}")
        return int(found[-1])


async def send(load: Load) -> Result:
    """Open all connections first, then send all requests."""
    loop = asyncio.get_running_loop()
    replies: list[_Reply] = []
    for body in load.bodies:
        _, reply = await loop.create_connection(
            lambda body=bytes(body): _Reply(body),  # type: ignore[misc]  # a lambda's default
            load.host,
            load.port,
        )
        replies.append(reply)
    started = time.perf_counter()
    for reply in replies:
        reply.begin()
    await asyncio.gather(*(reply.done for reply in replies))
    return Result(
        seconds=time.perf_counter() - started,
        tokens=sum(reply.tokens for reply in replies),
        num_bytes=sum(reply.num_bytes for reply in replies),
        events=sum(reply.events for reply in replies),
    )


if __name__ == "__main__":
    given = msgspec.json.decode(sys.stdin.buffer.read(), type=Load)
    try:
        sys.stdout.buffer.write(msgspec.json.encode(uvloop.run(send(given))))
    except (OSError, RuntimeError) as error:
        sys.exit(str(error))
