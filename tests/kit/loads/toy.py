"""What listens on this machine for the length of a block, in a thread or in the running loop."""

from __future__ import annotations

import asyncio
import threading
from typing import Any, Self


class Toy:
    """Listens at `url` between `with Toy() as toy:`, or `async with`, and the end of the block."""

    def __init__(self) -> None:
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection to its end. It is cut off when the block ends."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(120), f"{type(self).__name__} did not start"
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    async def __aenter__(self) -> Self:
        self._running = asyncio.create_task(self._run())
        while not self._ready.is_set():
            await asyncio.sleep(0)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stop.set()
        await self._running

    async def _run(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._tasks: set[asyncio.Task[Any] | None] = set()
        listening = await asyncio.start_server(self._connection, "127.0.0.1", 0, backlog=4096)
        self.url = "http://{}:{}".format(*listening.sockets[0].getsockname())
        self._ready.set()
        async with listening:
            await self._stop.wait()
            tasks = [task for task in self._tasks if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tasks.add(task := asyncio.current_task())
        try:
            await self.serve(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # one side left, or the block ends
        finally:
            self._tasks.discard(task)
            writer.close()
