"""EngineConnection: messages to one engine process and back, and whether it is there.

Keeps: whoever asked gets an answer, or an error that the engine is gone. Knows no streams.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from srm import metrics_memory
from srm.engine.messages import (
    Control,
    Done,
    FromEngine,
    Hello,
    LoadWeights,
    Outputs,
    PutWeights,
    Refusal,
    Status,
    TakeSnapshot,
    ToEngine,
    error_of,
)
from srm.errors import UNDECODABLE, EngineUnavailable, SRMError
from srm.tasks import Fail, beside, end_process, vital

MAX_INBOX = 64  # messages handled before others get their turn
_STARTING = "the engine has not answered yet: it is starting"
_GONE = "the engine does not answer any more: it is frozen or gone, and is started again"


class EngineConnection:
    """Belongs to one event loop."""

    def __init__(
        self,
        endpoint: str,
        heartbeat_s: float,
        engine_timeout_s: float,
        receive: Callable[[Outputs | Refusal | Done], None],
        settle: Callable[[], None],
        changed: Callable[[str], None],
        renews: bool = False,
        label: str = "",
    ) -> None:
        """`receive` is given what concerns requests, and `settle` called behind all that came
        together; `changed` is called for each new status, with
        an empty text, and with the reason when the engine is lost. `label` is that of its metrics.

        `renews`: no message comes any more from an engine that was taken for gone, and messages
        that it has not received are dropped: others run its requests.
        """
        self._endpoint = endpoint
        self._heartbeat_s = heartbeat_s
        self.engine_timeout_s = engine_timeout_s
        self._hand_on, self._settle, self._changed = receive, settle, changed
        self._renews = renews
        self._label = label
        self._is_connected = False
        self.losses = 0
        """How often the engine became unreachable."""
        self.status: Status | None = None
        """The engine's last Status; None while it cannot be reached."""
        self._status_at = 0.0
        self._stepped_at = 0.0  # when it last stepped or was idle
        self._asked_at: float | None = None  # when the first unanswered question was asked
        self._asked: dict[str, asyncio.Future[Done]] = {}  # by message id
        self._talk: asyncio.Task[None] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._decoder = msgspec.msgpack.Decoder[FromEngine](FromEngine)
        self._encoder = msgspec.msgpack.Encoder()

    @property
    def why_away(self) -> str:
        """Why the engine does not answer; empty while it has a status."""
        if self.status is not None:
            return ""
        region = metrics_memory.own_region()
        if region and (since := region.gauge(metrics_memory.STARTING_SINCE, self._label)[0]):
            doing = "loading"
            is_compiling, begun = region.gauge(metrics_memory.COMPILING, self._label)
            if is_compiling:
                doing, since = metrics_memory.COMPILES, begun
            return f"the engine is starting: {doing}, {max(0, time.time() - since):.0f} s so far"
        return _GONE if self.losses else _STARTING

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

    async def connect(self, fail: Fail = end_process) -> None:
        """Start talking to the engine, which need not be there yet. `fail` is called if that cannot
        go on, after which no message of the engine comes."""
        self._context = zmq.asyncio.Context()
        self._open()
        talk = vital(self._keep_talking, "what listens to the engine", fail)
        self._talk = asyncio.create_task(talk, name="engine client")

    async def close(self) -> None:
        """Stop talking: to whom it matters, the engine is lost."""
        if self._talk is not None:
            self._talk.cancel()
            await asyncio.gather(self._talk, return_exceptions=True)
        self._renews = False
        self._lose("the connection to the engine was closed")
        self._socket.disable_monitor()
        self._context.destroy(linger=0)

    async def ask(self, message: TakeSnapshot | LoadWeights | PutWeights | Control | Hello) -> Done:
        """Send a message that is not a request and wait for its answer, as long as it takes.

        Raises the error that the engine refuses it with, and EngineUnavailable where there is none.
        """
        if self.status is None:
            raise EngineUnavailable(self.why_away)
        answer: asyncio.Future[Done] = asyncio.get_running_loop().create_future()
        self._asked[message.id] = answer
        self.send(message)
        try:
            return await answer
        finally:
            del self._asked[message.id]

    def give_up(self, why: str) -> None:
        """Wait no more for an engine that is away: what was sent to it meanwhile is lost."""
        self._lose(why)

    def send(self, message: ToEngine) -> None:
        """Queue a message. Messages that a lost engine never received go to the next one in order:
        the Abort of a lost request follows the request."""
        if not self._socket.closed:
            self._socket.send(self._encoder.encode(message))

    def _open(self) -> None:
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

    def greet(self) -> None:
        """Ask the engine how it is."""
        if self._asked_at is None:
            self._asked_at = time.monotonic()
        self.send(Hello())

    async def _keep_talking(self) -> None:
        async with beside(self._keep_alive()):
            while True:
                socket, monitor = self._socket, self._monitor
                self._reading = asyncio.create_task(self._read())
                try:
                    await asyncio.wait([self._reading])
                finally:
                    self._reading.cancel()
                    await asyncio.gather(self._reading, return_exceptions=True)
                if not self._reading.cancelled():
                    self._reading.result()
                _close(socket, monitor)

    async def _read(self) -> None:
        """Hand out what arrives, and notice when the connection comes and goes."""
        inbox, monitor = self._inbox, self._monitor
        poller = zmq.asyncio.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(monitor, zmq.POLLIN)
        while True:
            ready = dict(await poller.poll())
            # Messages first: what the engine said before it hung up is worth more than that it did.
            while not inbox.closed and int(inbox.get(zmq.EVENTS)) & zmq.POLLIN:
                if not self._receive_some(inbox):
                    return
                await asyncio.sleep(0)
            if monitor in ready:
                event = (await recv_monitor_message(monitor))["event"]
                if event == zmq.EVENT_DISCONNECTED:
                    # The engine knows us by this connection: it cannot answer over another one.
                    self._is_connected = False
                    self._lose("the connection to the engine was lost")
                else:
                    self._is_connected = True
                    self._asked_at = None  # a question that was lost is not answered
                    self.greet()

    def _receive_some(self, inbox: zmq.Socket[bytes]) -> bool:
        """Take in some of what came; return whether more is to be read of this socket."""
        try:
            for _ in range(MAX_INBOX):
                try:
                    message = self._decoder.decode(inbox.recv(zmq.NOBLOCK))
                except zmq.Again:
                    break
                except UNDECODABLE as error:
                    self._lose(f"the engine said what is no message: {error}")
                    if self._renews:
                        return False
                else:
                    self.receive(message)
            return True
        finally:
            self._settle()

    def receive(self, message: FromEngine) -> None:
        """Take in what the engine says, or hand it on."""
        if isinstance(message, Outputs):
            self._hand_on(message)
        elif isinstance(message, Refusal):
            if message.id in self._asked:
                self._fail_asked([message.id], error_of(message))
            else:
                self._hand_on(message)
        elif isinstance(message, Done):
            if (answer := self._asked.get(message.id)) is None:
                self._hand_on(message)
            elif not answer.done():
                answer.set_result(message)
        else:
            self._asked_at, self._status_at = None, time.monotonic()
            if self._has_progressed(message):
                self._stepped_at = self._status_at
            self.status = message
            self._changed("")

    def _has_progressed(self, status: Status) -> bool:
        """Whether the engine stepped since the last Status, or was idle then or is idle now."""
        last = self.status
        is_idle = [
            each is None or each.paused or not (each.running or each.waiting)
            for each in (last, status)
        ]
        return any(is_idle) or last is None or status.steps != last.steps

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(self._heartbeat_s)
            silent = self.status is not None and self.silent_s > self.engine_timeout_s
            # We may be the slow one: an answer that waits to be read is an answer.
            if silent and not int(self._inbox.get(zmq.EVENTS)) & zmq.POLLIN:
                self._lose(f"the engine has not answered for {self.silent_s:.0f} s")
            if self._is_connected:
                self.greet()

    def _lose(self, why: str) -> None:
        self.losses += self.status is not None
        self.status = None
        if self._renews and self._reading is not None:
            # Before anything else is sent: what was not received is not to be, and nothing comes.
            self._is_connected = False
            if self._reading.cancelling() or self._reading.done():  # the newest is not read yet
                _close(self._socket, self._monitor)
            self._reading.cancel()
            self._open()
        self._fail_asked(self._asked, EngineUnavailable(why))
        self._changed(why)

    def _fail_asked(self, ids: Iterable[str], error: SRMError) -> None:
        for answer in [self._asked[id] for id in ids]:
            if not answer.done():
                answer.set_exception(error)


def _close(socket: zmq.asyncio.Socket, monitor: zmq.asyncio.Socket) -> None:
    socket.disable_monitor()
    monitor.close(linger=0)
    socket.close(linger=0)
