"""A TCP proxy that makes trouble on purpose: it delays, stalls, or cuts what goes through it.

It stands between a client and a server and knows no HTTP but the word POST, by which it counts
requests so that trouble can begin at a known place of a run. `srm loadtest` sends one before a run,
which counts as well.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import NamedTuple
from urllib.parse import urlsplit

from tests.kit.loads.toy import Toy

_CHUNK = 1 << 16


class Stall(NamedTuple):
    """When nothing went through, in either direction; seconds of the monotonic clock."""

    begin: float
    end: float


@dataclasses.dataclass
class _Pair:
    """Both ends of one connection, and bytes of the reply until it is cut."""

    client: asyncio.StreamWriter
    server: asyncio.StreamWriter
    left: int | None = None


class FaultProxy(Toy):
    """Stands before one server."""

    def __init__(
        self,
        url: str,
        delay_s: float = 0.0,
        stall_s: float = 0.0,
        stall_at: int = 1,
        cut_at: frozenset[int] = frozenset(),
        cut_after_bytes: int = 400,
    ) -> None:
        """What the client says is delayed by `delay_s`, replies are not. Requests count from 1.

        With request `stall_at`, which is held by it, begins a stall of `stall_s`. The connections
        of those in `cut_at` are cut after so many bytes of the reply, head included.
        """
        super().__init__()
        parts = urlsplit(url)
        self._server = parts.hostname, parts.port
        self._delay_s, self._stall_s, self._stall_at = delay_s, stall_s, stall_at
        self._cut_at, self._cut_after_bytes = cut_at, cut_after_bytes
        self.requests = self.cuts = 0
        self.stall: Stall | None = None
        self._open = asyncio.Event()
        self._open.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back_reader, back_writer = await asyncio.open_connection(*self._server)
        pair = _Pair(writer, back_writer)
        try:
            await asyncio.gather(self._forward(reader, pair), self._back(back_reader, pair))
        finally:
            back_writer.close()

    async def _forward(self, reader: asyncio.StreamReader, pair: _Pair) -> None:
        """What the client says, until it leaves; then the server is told that it did."""
        due: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        sending = asyncio.create_task(self._send_when_due(due, pair))
        try:
            while content := await reader.read(_CHUNK):
                if content.startswith(b"POST "):
                    self._count(pair)
                due.put_nowait((time.monotonic() + self._delay_s, content))
        finally:
            sending.cancel()
            pair.server.close()

    def _count(self, pair: _Pair) -> None:
        self.requests += 1
        pair.left = self._cut_after_bytes if self.requests in self._cut_at else None
        if self._stall_s and self.requests == self._stall_at:
            self._open.clear()
            begin = time.monotonic()
            self._loop.call_at(begin + self._stall_s, self._end_stall, begin)

    def _end_stall(self, begin: float) -> None:
        self.stall = Stall(begin, time.monotonic())
        self._open.set()

    async def _send_when_due(self, due: asyncio.Queue[tuple[float, bytes]], pair: _Pair) -> None:
        while True:
            when, content = await due.get()
            await asyncio.sleep(max(when - time.monotonic(), 0))
            await self._open.wait()
            pair.server.write(content)

    async def _back(self, reader: asyncio.StreamReader, pair: _Pair) -> None:
        """What the server says."""
        while content := await reader.read(_CHUNK):
            await self._open.wait()
            if pair.left is not None:
                content = content[: pair.left]
                pair.left -= len(content)
            pair.client.write(content)
            await pair.client.drain()
            if pair.left == 0:
                self.cuts += 1
                pair.client.close()
                pair.server.transport.abort()
                return
        pair.client.close()
