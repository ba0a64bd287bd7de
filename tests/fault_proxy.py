"""A TCP proxy that makes trouble on purpose: it delays, stalls, or cuts what goes through it.

It stands between a client and a server and knows no HTTP but the word POST, by which it counts
requests so that trouble can begin at a known place of a run.
"""

from __future__ import annotations

import asyncio
import threading
import time
from types import TracebackType
from typing import NamedTuple
from urllib.parse import urlsplit

_CHUNK = 1 << 16


class Stall(NamedTuple):
    """When nothing went through, in either direction; seconds of the monotonic clock."""

    begin: float
    end: float


class FaultProxy:
    """Listens at `url` between `with FaultProxy(server.url, …) as proxy:` and the block's end."""

    def __init__(
        self,
        url: str,
        delay_s: float = 0.0,
        stall_s: float = 0.0,
        stall_at: int = 1,
        cut_at: frozenset[int] = frozenset(),
        cut_after_bytes: int = 400,
    ) -> None:
        """
        Args:
            url: Of the server.
            delay_s: How much later everything comes through, in both directions together: what
                the client says is delayed by it, replies are not.
            stall_s: How long nothing comes through, once.
            stall_at: The stall begins with this request, counted from 1, and holds it.
            cut_at: Requests, counted from 1, whose connection is cut once `cut_after_bytes` of
                the reply have come through.
            cut_after_bytes: Of the reply, head included.
        """
        parts = urlsplit(url)
        assert parts.hostname is not None and parts.port is not None
        self._server = (parts.hostname, parts.port)
        self._delay_s, self._stall_s, self._stall_at = delay_s, stall_s, stall_at
        self._cut_at, self._cut_after_bytes = cut_at, cut_after_bytes
        self.requests = 0
        self.cuts = 0
        self.stall: Stall | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=asyncio.run, args=(self._run(),))

    def __enter__(self) -> FaultProxy:
        self._thread.start()
        assert self._ready.wait(10), "the proxy did not start"
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    async def _run(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._open = asyncio.Event()
        self._open.set()
        self._tasks: set[asyncio.Task[None]] = set()
        listening = await asyncio.start_server(self._connection, "127.0.0.1", 0, backlog=4096)
        self.url = "http://{}:{}".format(*listening.sockets[0].getsockname())
        self._ready.set()
        async with listening:
            await self._stop.wait()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            back_reader, back_writer = await asyncio.open_connection(*self._server)
            pair = _Pair(writer, back_writer)
            ways = (self._forward(reader, pair), self._back(back_reader, pair))
            try:
                await asyncio.gather(*ways)
            finally:
                back_writer.close()
        except (ConnectionError, asyncio.CancelledError):
            pass  # one side left, or it was cut, or the proxy ends
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _forward(self, reader: asyncio.StreamReader, pair: _Pair) -> None:
        """What the client says, until it leaves; then the server is told that it did."""
        due: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        sender = asyncio.create_task(self._send_when_due(due, pair))
        try:
            while content := await reader.read(_CHUNK):
                if content.startswith(b"POST "):
                    self._count(pair)
                due.put_nowait((time.monotonic() + self._delay_s, content))
        finally:
            sender.cancel()
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


class _Pair:
    """Both ends of one connection."""

    def __init__(self, client: asyncio.StreamWriter, server: asyncio.StreamWriter) -> None:
        self.client, self.server = client, server
        self.left: int | None = None
        """Bytes of the reply until it is cut."""
