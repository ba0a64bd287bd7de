"""An event loop whose clock a test turns: time passes only when nothing is left to do before it.

Connections are pipes within the process. So what runs in it takes the same times whatever else the
machine does, and a run of minutes ends at once.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest.mock import patch

T = TypeVar("T")
Protocols = Callable[[], asyncio.Protocol]


class _Clock(selectors.SelectSelector):
    """Instead of waiting it turns the clock."""

    now = 1000.0

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "nothing is left that could happen"
        self.now += max(timeout, 0.0)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Knows TCP on one host, timers and tasks; no files, processes or threads."""

    def __init__(self) -> None:
        self._clock = _Clock()
        super().__init__(self._clock)
        self._clock_resolution = 1e-12  # of asyncio: how early things may happen
        self._listening: dict[int, Protocols] = {}

    def time(self) -> float:
        return self._clock.now

    def add_reader(self, *_: Any) -> None:  # type: ignore[override]
        """Nothing comes from outside."""

    async def create_server(self, factory: Protocols, *_: Any, **__: Any) -> Any:  # type: ignore[override]
        port = 10_000 + len(self._listening)
        self._listening[port] = factory
        return _Listening(port)

    async def create_connection(  # type: ignore[override]
        self, factory: Protocols, host: str, port: int, **_: Any
    ) -> tuple[asyncio.Transport, asyncio.Protocol]:
        near, far = factory(), self._listening[port]()
        pair = _Pipe(self, near), _Pipe(self, far)
        pair[0].peer, pair[1].peer = reversed(pair)
        far.connection_made(pair[1])
        near.connection_made(pair[0])
        return pair[0], near


class _Listening:
    """As much of an asyncio.Server as is asked for."""

    def __init__(self, port: int) -> None:
        self.sockets = [SimpleNamespace(getsockname=lambda: ("127.0.0.1", port))]

    async def __aenter__(self) -> None: ...

    async def __aexit__(self, *_: object) -> None: ...


class _Pipe(asyncio.Transport):
    """One end of a connection: what is written comes out of the other in the loop's next turn."""

    peer: _Pipe

    def __init__(self, loop: VirtualLoop, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self._loop, self._protocol = loop, protocol
        self._is_over = False

    def write(self, data: Any) -> None:
        if not self._is_over:
            self._loop.call_soon(self.peer.deliver, bytes(data))

    def deliver(self, data: bytes) -> None:
        if not self._is_over:
            self._protocol.data_received(data)

    def close(self) -> None:
        """What was written before still arrives."""
        if not self._is_over:
            self._is_over = True
            self._loop.call_soon(self._protocol.connection_lost, None)
            self._loop.call_soon(self.peer.close)

    abort = close

    def is_closing(self) -> bool:
        return self._is_over

    def pause_reading(self) -> None:
        """Whoever reads here has room."""

    resume_reading = pause_reading


class _Alarm:
    """`loadtest.client.pacing.Alarm` on the loop's clock; rings a nanosecond late, so never
    early."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback, self._loop = callback, asyncio.get_running_loop()
        self._handle: asyncio.TimerHandle | None = None

    def set(self, at: float) -> None:
        self.close()
        self._handle = self._loop.call_at(at + 1e-9, self._callback)

    def close(self) -> None:
        if self._handle is not None:
            self._handle.cancel()


def virtually(work: Coroutine[Any, Any, T]) -> T:
    """What it returns, with the clock of the loop, and the monotonic one, turned by the loop."""
    loop = VirtualLoop()
    with (
        patch("time.monotonic", loop.time),
        patch("srm.loadtest.client.pacing.Alarm", _Alarm),
        asyncio.Runner(loop_factory=lambda: loop) as runner,
    ):
        return runner.run(work)
