"""EngineClient: requests and aborts from an API process's event loop to the engine process.

Keeps: a request ends in all its terminal Outputs or in an error, never in silence; and leaving
`generate` early, however it happens, aborts the request. There is no other cancellation code.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import contextmanager

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from engine.client.streams import Stream, Streams
from engine.errors import UNDECODABLE, EngineUnavailable, InvalidRequest, SRMError
from engine.messages import (
    Done,
    FromEngine,
    Hello,
    LoadWeights,
    Output,
    Outputs,
    Refusal,
    Request,
    Running,
    Status,
    TakeSnapshot,
    ToEngine,
    error_of,
)
from engine.tasks import beside

logger = logging.getLogger(__name__)

MAX_INBOX = 64  # messages handled before others get their turn
HEARTBEAT_S = 1.0
ENGINE_TIMEOUT_S = 10.0
"""Seconds without an answer to a heartbeat after which the engine counts as gone."""


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
        self.is_closed = False
        """Whether `close` was called: nothing is received any more."""
        self.losses = 0
        """How often the engine became unreachable."""
        self.status: Status | None = None
        """The engine's last Status; None while it cannot be reached."""
        self._fingerprints: dict[int, str] = {}  # by weights_version
        self._status_at = 0.0
        self._stepped_at = 0.0  # when it last stepped or was idle
        self._asked_at: float | None = None  # when the first unanswered question was asked
        self._has_status = asyncio.Event()
        self._streams = Streams(self._send)
        self._asked: dict[str, asyncio.Future[Done]] = {}  # by message id
        self._talk: asyncio.Task[None] | None = None
        self._decoder = msgspec.msgpack.Decoder[FromEngine](FromEngine)
        self._encoder = msgspec.msgpack.Encoder()

    def fingerprint(self, weights_version: int) -> str | None:
        """Return the fingerprint of a version that the engine uses or has used; else None."""
        return self._fingerprints.get(weights_version)

    @property
    def silent_s(self) -> float:
        """Seconds for which the engine has owed an answer, not those since its last one: a client
        that was suspended has not asked. 0 if it owes none."""
        return 0.0 if self._asked_at is None else time.monotonic() - self._asked_at

    @property
    def stalled_s(self) -> float:
        """Seconds for which the engine has reported work but made no step. It answers only between
        steps: one that hangs inside a step is silent instead."""
        return self._status_at - self._stepped_at

    async def connect(self) -> None:
        """Start talking to the engine, which need not be there yet."""
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        # No high-water mark, so that sending never waits; the engine bounds what it accepts.
        self._socket.sndhwm = self._socket.rcvhwm = 0
        # The same socket, read without a future.
        self._inbox: zmq.Socket[bytes] = zmq.Socket.shadow(self._socket)
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )
        self._socket.connect(self._endpoint)
        self._talk = asyncio.create_task(self._keep_talking(), name="engine client")
        self._talk.add_done_callback(self._say_why)

    async def wait_until_ready(self, timeout_s: float) -> Status:
        """The engine's first Status; EngineUnavailable if it takes longer than `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._has_status.wait()
        except TimeoutError:
            raise EngineUnavailable(f"no engine answered within {timeout_s:g} s") from None
        assert self.status is not None
        return self.status

    async def close(self) -> None:
        """Stop talking. Requests still running raise EngineUnavailable; no Abort is sent for them:
        durable ones go on, for whoever sends them again."""
        self.is_closed = True
        if self._talk is not None:
            self._talk.cancel()
            await asyncio.gather(self._talk, return_exceptions=True)
        self._lose("the connection to the engine was closed")
        self._socket.disable_monitor()
        self._context.destroy(linger=0)

    async def generate(self, request: Request) -> AsyncGenerator[Output, None]:
        """Run a request; yields its Outputs until each of its n completions has ended.

        Raises the RequestError the engine refuses it with, EngineUnavailable when the engine is
        not there, drains or goes away, StepFailed when it breaks.
        """
        assert request.emit != "columns", "columns are no Outputs: open a stream"
        with self.open([request]) as stream:
            while stream.unfinished:
                await stream.wait()
                for _, output in stream.take_outputs():
                    yield output

    @contextmanager
    def open(self, requests: Sequence[Request]) -> Iterator[Stream]:
        """Run requests that have the same n, until each completion has ended or the block is left.

        Raises EngineUnavailable where there is no engine; the stream's `wait` raises all else.
        """
        if self.status is None:
            raise EngineUnavailable("the engine is not ready")
        for request in requests:
            if self._streams.has_request(request.id):
                raise InvalidRequest(f"id {request.id!r} is in use by a running request", "id")
        stream = self._streams.open(requests)
        try:
            yield stream
        finally:
            stream.close()

    async def snapshot(self) -> Done:
        """Have the engine write a snapshot of durable requests; returns when it is on disk. Raises
        SnapshotError if it cannot be, and EngineUnavailable."""
        return await self.ask(TakeSnapshot(uuid.uuid4().hex))

    async def load_weights(self, path: str, running: Running) -> Done:
        """Have the engine go on with the weights in this folder; returns when it does. Raises the
        error that it refuses them with, SwapInProgress, and EngineUnavailable."""
        return await self.ask(LoadWeights(uuid.uuid4().hex, path, running))

    async def ask(self, message: TakeSnapshot | LoadWeights) -> Done:
        """Send a message that is not a request and wait for its answer, as long as it takes.

        Raises the error that the engine refuses it with, and EngineUnavailable where there is none.
        """
        if self.status is None:
            raise EngineUnavailable("the engine is not ready")
        answer: asyncio.Future[Done] = asyncio.get_running_loop().create_future()
        self._asked[message.id] = answer
        self._send(message)
        try:
            return await answer
        finally:
            del self._asked[message.id]

    def _send(self, message: ToEngine) -> None:
        """Queue a message. Messages that a lost engine never received go to the next one in order:
        the Abort of a lost request follows the request."""
        if not self._socket.closed:
            self._socket.send(self._encoder.encode(message))

    def _ask(self) -> None:
        if self._asked_at is None:
            self._asked_at = time.monotonic()
        self._send(Hello())

    async def _keep_talking(self) -> None:
        async with beside(self._keep_alive()):
            await self._read()

    def _say_why(self, talk: asyncio.Task[None]) -> None:
        if not talk.cancelled() and (error := talk.exception()):
            logger.error("nothing is heard of the engine any more", exc_info=error)
            self._lose(f"what listens to it failed: {error}")

    async def _read(self) -> None:
        """Hand out what arrives, and notice when the connection comes and goes."""
        inbox = self._inbox
        poller = zmq.asyncio.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        while True:
            ready = dict(await poller.poll())
            # Messages first: what the engine said before it hung up is worth more than that it did.
            while not inbox.closed and int(inbox.get(zmq.EVENTS)) & zmq.POLLIN:
                for _ in range(MAX_INBOX):
                    try:
                        message = self._decoder.decode(inbox.recv(zmq.NOBLOCK))
                    except zmq.Again:
                        break
                    except UNDECODABLE as error:
                        self._lose(f"the engine said what is no message: {error}")
                    else:
                        self._receive(message)
                await asyncio.sleep(0)
            if self._monitor in ready:
                event = (await recv_monitor_message(self._monitor))["event"]
                if event == zmq.EVENT_DISCONNECTED:
                    # The engine knows us by this connection: it cannot answer over another one.
                    self._is_connected = False
                    self._lose("the connection to the engine was lost")
                else:
                    self._is_connected = True
                    self._asked_at = None  # a question that was lost is not answered
                    self._ask()

    def _receive(self, message: FromEngine) -> None:
        if isinstance(message, Outputs):
            self._streams.receive(message)
        elif isinstance(message, Refusal):
            if message.id in self._asked:
                self._fail_asked([message.id], error_of(message))
            else:
                self._streams.refuse(message.id, error_of(message))
        elif isinstance(message, Done):
            if (answer := self._asked.get(message.id)) is not None and not answer.done():
                answer.set_result(message)
        else:
            self._asked_at, self._status_at = None, time.monotonic()
            if self._has_progressed(message):
                self._stepped_at = self._status_at
            self.status = message
            self._fingerprints[message.weights_version] = message.fingerprint
            self._has_status.set()

    def _has_progressed(self, status: Status) -> bool:
        """Whether the engine stepped since the last Status, or was idle then or is idle now."""
        last = self.status
        is_idle = [one is None or not (one.running or one.waiting) for one in (last, status)]
        return any(is_idle) or last is None or status.steps != last.steps

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(self._heartbeat_s)
            silent = self.status is not None and self.silent_s > self._engine_timeout_s
            # We may be the slow one: an answer that waits to be read is an answer.
            if silent and not int(self._inbox.get(zmq.EVENTS)) & zmq.POLLIN:
                self._lose(f"the engine has not answered for {self.silent_s:.0f} s")
            if self._is_connected:
                self._ask()

    def _lose(self, why: str) -> None:
        self.losses += self.status is not None
        self.status = None
        self._has_status.clear()
        self._streams.fail(lambda: EngineUnavailable(why))
        self._fail_asked(self._asked, EngineUnavailable(why))

    def _fail_asked(self, ids: Iterable[str], error: SRMError) -> None:
        for answer in [self._asked[one] for one in ids]:
            if not answer.done():
                answer.set_exception(error)
