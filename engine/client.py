"""EngineClient: requests and aborts from an API process's event loop to the engine process.

Knows no engine internals: only messages. Keeps: a request ends in all its terminal Outputs or in
an error, never in silence; and leaving `generate` early, however it happens, aborts the request.
That is the only cancellation code there is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from engine.errors import (
    ContextTooLong,
    EngineUnavailable,
    InvalidRequest,
    NotFound,
    Overloaded,
    RequestError,
    SRMError,
    StepFailed,
    TimedOut,
)
from engine.messages import (
    Abort,
    FromEngine,
    Hello,
    Output,
    Outputs,
    Refusal,
    Request,
    Status,
    ToEngine,
)

HEARTBEAT_S = 1.0
ENGINE_TIMEOUT_S = 10.0
"""An engine that has not answered a heartbeat for this long is taken for gone."""


class EngineClient:
    """One API process's connection to the engine. Belongs to one event loop."""

    def __init__(
        self,
        endpoint: str,
        heartbeat_s: float = HEARTBEAT_S,
        engine_timeout_s: float = ENGINE_TIMEOUT_S,
    ) -> None:
        self._endpoint = endpoint
        self._heartbeat_s = heartbeat_s
        self._engine_timeout_s = engine_timeout_s
        self._is_connected = False
        self._status: Status | None = None
        self._status_at = 0.0
        self._has_status = asyncio.Event()
        self._queues: dict[str, asyncio.Queue[Output | SRMError]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._decoder = msgspec.msgpack.Decoder[FromEngine](FromEngine)
        self._encoder = msgspec.msgpack.Encoder()

    @property
    def status(self) -> Status | None:
        """What the engine last said of itself; None while it is not to be reached."""
        return self._status

    async def connect(self) -> None:
        """Start talking to the engine, which need not be there yet."""
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        # No high-water mark, so that sending never waits; the engine bounds what it accepts.
        self._socket.sndhwm = self._socket.rcvhwm = 0
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )
        self._socket.connect(self._endpoint)
        self._tasks = [
            asyncio.create_task(self._read(), name="engine client: read"),
            asyncio.create_task(self._keep_alive(), name="engine client: heartbeat"),
        ]

    async def wait_until_ready(self, timeout_s: float) -> Status:
        """The engine's first Status; EngineUnavailable if it takes longer than `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._has_status.wait()
        except TimeoutError:
            raise EngineUnavailable(f"no engine answered within {timeout_s:g} s") from None
        assert self._status is not None
        return self._status

    async def close(self) -> None:
        """Stop talking. Requests still running raise EngineUnavailable."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._lose("the connection to the engine was closed")
        self._socket.disable_monitor()
        self._context.destroy(linger=0)

    async def generate(self, request: Request) -> AsyncGenerator[Output, None]:
        """Run a request; yields its Outputs until each of its n completions has ended.

        Raises the RequestError the engine refuses it with, EngineUnavailable when the engine is
        not there, drains or goes away, StepFailed when it breaks.
        """
        if self._status is None:
            raise EngineUnavailable("the engine is not ready")
        if request.id in self._queues:
            raise InvalidRequest(f"id {request.id!r} is in use by a running request", "id")
        queue = self._queues[request.id] = asyncio.Queue()
        unfinished = request.params.n
        try:
            self._send(request)
            while unfinished:
                item = await queue.get()
                if isinstance(item, SRMError):
                    raise item
                unfinished -= item.finish_reason is not None
                yield item
        finally:
            del self._queues[request.id]
            if unfinished:
                self._send(Abort(request.id))

    def _send(self, message: ToEngine) -> None:
        """Queue a message. What the engine never got before it went, the next one gets in order:
        the Abort of a lost request follows the request."""
        if not self._socket.closed:
            self._socket.send(self._encoder.encode(message))

    async def _read(self) -> None:
        """Hand out what arrives, and notice when the connection comes and goes."""
        poller = zmq.asyncio.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        while True:
            ready = dict(await poller.poll())
            # Messages first: what the engine said before it hung up is worth more than that it did.
            while await self._socket.poll(0):
                self._receive(self._decoder.decode(await self._socket.recv()))
            if self._monitor in ready:
                event = (await recv_monitor_message(self._monitor))["event"]
                if event == zmq.EVENT_DISCONNECTED:
                    # The engine knows us by this connection: it cannot answer over another one.
                    self._is_connected = False
                    self._lose("the connection to the engine was lost")
                else:
                    self._is_connected = True
                    self._send(Hello())

    def _receive(self, message: FromEngine) -> None:
        if isinstance(message, Outputs):
            for output in message.outputs:
                self._put(output.id, output)
        elif isinstance(message, Refusal):
            self._put(message.id, _error(message))
        else:
            self._status = message
            self._status_at = time.monotonic()
            self._has_status.set()

    def _put(self, request_id: str, item: Output | SRMError) -> None:
        queue = self._queues.get(request_id)
        if queue is not None:  # otherwise its reader has left, and an Abort is on its way
            queue.put_nowait(item)

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(self._heartbeat_s)
            silent_s = time.monotonic() - self._status_at
            if self._status is not None and silent_s > self._engine_timeout_s:
                self._lose(f"the engine has not answered for {silent_s:.0f} s")
            if self._is_connected:
                self._send(Hello())

    def _lose(self, why: str) -> None:
        self._status = None
        self._has_status.clear()
        for request_id in self._queues:
            self._put(request_id, EngineUnavailable(why))


_ERRORS: dict[str, type[SRMError]] = {
    kind.code: kind
    for kind in (
        *(InvalidRequest, ContextTooLong, NotFound),
        *(EngineUnavailable, StepFailed, TimedOut),
    )
}


def _error(refusal: Refusal) -> SRMError:
    if refusal.code == Overloaded.code:
        return Overloaded(refusal.message, refusal.retry_after_s or 1)
    kind = _ERRORS.get(refusal.code, SRMError)
    if issubclass(kind, RequestError):
        return kind(refusal.message, refusal.param)
    return kind(refusal.message)
