"""The engine process: inbox → step → outbox, until it is to stop.

One thread owns the engine and the socket of its clients. Between steps it reads what API processes
sent; after a step it sends one message to each process that the step concerns. Keeps: whatever a
client sends, the loop goes on, and whatever happens to the engine, every request a live client sent
is answered.
"""

from __future__ import annotations

import logging
import signal
import time
from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from types import FrameType

import msgspec
import numpy as np

from srm.engine import metrics
from srm.engine.messages import (
    Abort,
    AboutWeights,
    Control,
    Done,
    DropPrefixes,
    EndRequests,
    FromEngine,
    Hello,
    HoldWeights,
    LoadWeights,
    Output,
    Outputs,
    Pause,
    ReadSample,
    Request,
    Resume,
    StartSamples,
    StopSamples,
    TakeSnapshot,
    ToEngine,
    refusal,
)
from srm.engine.process.clients import Clients
from srm.engine.process.compiling import Compiling
from srm.engine.process.durable import Detail, Durable
from srm.engine.process.engine import Engine
from srm.engine.process.pausing import Pausing
from srm.engine.process.watchdog import Heartbeat, Watchdog
from srm.engine.process.weight_reload import WeightReload
from srm.engine.process.weights_note import LoadFolder, SharedNote
from srm.engine.state.sequence import STREAMS
from srm.engine.weights.checkpoint import load_checkpoint
from srm.engine.wiring import EngineWiring
from srm.errors import (
    UNDECODABLE,
    EngineUnavailable,
    InvalidRequest,
    RequestError,
    SnapshotError,
    SRMError,
    StepFailed,
    SwapInProgress,
    TimedOut,
)

logger = logging.getLogger(__name__)

CLIENT_TIMEOUT_S = 10.0
"""Seconds without the Hello that a client says every second or so, after which it is looked whether
it is there."""
IDLE_WAIT_MS = 250
"""Milliseconds that an idle engine sleeps before it looks at the clock and at signals again."""
BUSY_WAIT_MS = 5  # the same while a snapshot is written or weights are loaded
MAX_INBOX = 100_000
INBOX_S = 0.1
"""Messages read between two steps at most, and seconds for which they are where the last step took
no longer: so senders have half of the time at most, and what is sent in vain is not begun."""
STREAM_BITS = STREAMS.bit_length() - 1


class _Named(msgspec.Struct):
    """The field of a message that an answer needs."""

    id: str


class EngineProcess:
    """Serves one engine to the clients of one endpoint."""

    def __init__(
        self,
        engine: Engine,
        config: EngineWiring,
        client_timeout_s: float = CLIENT_TIMEOUT_S,
        progress: Callable[[], None] = lambda: None,
        load: LoadFolder = load_checkpoint,
    ) -> None:
        """`progress` is called between steps, and several times a second while there are none;
        `load` reads the folders of other weights."""
        self._progress = progress
        self._engine = engine
        self._config = config
        self._step = engine.step_overlapped if config.overlap else engine.step
        self._owner: dict[str, bytes] = {}  # the client of each request
        self._durable = Durable(engine, config)
        self._durable_ids: set[str] = set()  # requests that are durable
        self._compiling = Compiling(engine.grammars, config.max_waiting)
        self._time_out: deque[tuple[float, bytes, str]] = deque()
        """Deadline, client and id, in order of arrival."""
        self.weight_reload = WeightReload(
            engine, load, SharedNote(config.weights_note_fd), config.weights_copies
        )
        """The change of weights that is under way, if one is."""
        self._pausing = Pausing(config.pause_fd)
        self._waiting_pauses: list[tuple[bytes, Done]] = []
        """Clients whose pause waits for what runs, each with its answer."""
        self._holds_back = False
        self._deadline: float | None = None  # of the drain; None: not draining
        self._leaves_at_once = False
        self._read_at = time.monotonic()  # when the inbox was read last
        self._decoder = msgspec.msgpack.Decoder[ToEngine](ToEngine)
        self._encoder = msgspec.msgpack.Encoder()
        self.clients = Clients(config.endpoint, client_timeout_s)
        """Who speaks to it. Stream numbers have their client's number above their STREAM_BITS."""

    def drain(self) -> None:
        """Refuse new requests, finish what runs, then return from `run`; a second call stops at
        once. Durable requests are not finished: a snapshot is taken of them."""
        now = time.monotonic()
        self._leaves_at_once = self._deadline is not None
        self._deadline = now if self._leaves_at_once else now + self._config.drain_s

    def run(self) -> int:
        """Serve until drained or broken; return the process's exit code."""
        try:
            while not self._is_over():
                self._progress()
                self._read_inbox()
                self._add_compiled()
                self._drop_dead_clients()
                self._end_overdue()
                self._change_weights()
                self._durable.tick(bool(self._durable_ids))
                if self._durable.wants_part:
                    self._send_outputs(self._engine.settle())
                    self._durable.advance()
                if self._pausing.has_changed():
                    self._send_statuses()
                self._hold_back()
                if self._makes_steps:
                    self._send_outputs(self._step())
                elif self._engine.has_work:  # what waits beside what is paused is to be seen
                    self._engine.update_gauges()
            self._take_last_snapshot()
            self._refuse_all(EngineUnavailable("the engine is shutting down"))
            return 0
        except Exception:  # the process boundary: nothing here can be mended, so say it and stop
            logger.exception("the engine failed; stopping")
            self._refuse_all(StepFailed("the engine failed while this request was running"))
            return StepFailed.exit_code
        finally:
            self._compiling.close()
            self.weight_reload.close()
            self.clients.close()

    @property
    def _makes_steps(self) -> bool:
        ends_first = self._pausing.waits and not self._engine.scheduler.is_quiet
        return self._engine.has_work and (ends_first or not self._is_paused)

    @property
    def _is_paused(self) -> bool:
        return self._pausing.is_paused and self._deadline is None  # what is drained is to end

    def _hold_back(self) -> None:
        """Let nothing begin where a pause waits for what runs; answer those that have waited."""
        holds_back = self._is_paused and self._pausing.waits
        if holds_back or self._holds_back:
            self._engine.scheduler.is_held = holds_back or self.weight_reload.held_s > 0
        self._holds_back = holds_back
        if holds_back and self._waiting_pauses and not self._engine.scheduler.is_quiet:
            self._pausing.renew()  # whoever paused is still there
            return
        error = EngineUnavailable("it was resumed before all that ran had ended")
        for client, done in self._waiting_pauses:
            self._send(client, done if self._is_paused else refusal(done.id, error))
        self._waiting_pauses.clear()

    def _is_over(self) -> bool:
        if self._deadline is None:
            return False
        has_requests = self._engine.has_work or self._engine.scheduler.num_requests > 0
        has_others = has_requests and len(self._owner) > len(self._durable_ids)
        return not has_others or time.monotonic() >= self._deadline

    def _take_last_snapshot(self) -> None:
        deadline = time.monotonic() + self._config.snapshot_s
        self._send_outputs(self._engine.settle())
        self._durable.finish(
            lambda: self._leaves_at_once or time.monotonic() >= deadline, self._progress
        )

    def _read_inbox(self) -> None:
        """Handle what has arrived; wait for something only if there is nothing to step."""
        is_changing = self.weight_reload.current is not None
        is_busy = self._durable.is_busy or is_changing or len(self._compiling) > 0
        wait_ms = BUSY_WAIT_MS if is_busy else IDLE_WAIT_MS
        if not self._makes_steps and not self.clients.socket.poll(wait_ms):
            return
        began = time.monotonic()
        ends = began + max(INBOX_S, began - self._read_at)
        for _ in range(MAX_INBOX):
            if (received := self.clients.receive()) is None:
                self._read_at = time.monotonic()
                return
            self._receive(*received)
            if time.monotonic() >= ends:
                break
        self._read_at = time.monotonic()
        # A Hello may stand behind all that is left: its sender is to hear that the engine is there.
        for client in self.clients:
            self._send_status(client)

    def _receive(self, client: bytes, payload: bytes) -> None:
        try:
            message = self._decoder.decode(payload)
        except UNDECODABLE as error:
            self._refuse_malformed(client, payload, error)
            return
        if isinstance(message, Hello):
            if self._deadline is None:  # else it leaves anyway, and what runs is to end first
                self.weight_reload.check_note()
            self._send_status(client)
            if message.id:
                self._send(client, Done(message.id))
        elif isinstance(message, Abort):
            change = (
                self.weight_reload.current
            )  # may be dropped over another connection than it came by
            sampled = 0
            if self._owner.get(message.id) == client or (change and change.id == message.id):
                self._forget(message.id)
                sampled = self._engine.scheduler.count_sampled(message.id)
                self._engine.abort(message.id)
            self._compiling.drop(client, message.id)
            if message.is_counted:
                self._send(client, Done(message.id, {"tokens": sampled}))
        elif isinstance(message, TakeSnapshot):
            self._durable.ask(partial(self._answer, client, message.id))
        elif isinstance(message, StopSamples | StartSamples):
            self._choose_samples(client, message)
        elif isinstance(message, Request):
            self._receive_request(client, message)
        elif isinstance(message, Control):
            self._control(client, message)
        else:
            self._swap(client, message)

    def _swap(self, client: bytes, message: AboutWeights) -> None:
        if self._deadline is None:
            self.weight_reload.check_note()
        if not isinstance(message, HoldWeights):  # which says nothing of whoever paused
            self._pausing.renew()
        goes_on = isinstance(message, LoadWeights) and message.running == "continue"
        if goes_on and self._pausing.refeeds:
            message = msgspec.structs.replace(message, running="refeed")
        try:
            self._check_may_finish(message)
            if done := self.weight_reload.receive(message):
                self._send(client, done)
        except SRMError as error:
            self._send(client, refusal(message.id, error))
        else:
            if isinstance(message, LoadWeights):
                self._owner[message.id] = client

    def _check_may_finish(self, message: AboutWeights) -> None:
        waits = isinstance(message, LoadWeights) and message.running == "finish"
        if waits and self._is_paused and not self._engine.scheduler.is_quiet:
            raise InvalidRequest(
                "running = 'finish' would wait for sequences that are paused: resume them, or ask "
                "for 'continue' or 'drop'",
                "running",
            )

    def _control(self, client: bytes, message: Control) -> None:
        self._send_outputs(self._engine.settle())
        try:
            if isinstance(message, Pause | Resume):
                self._check_may_pause(message)
                done = self._pausing.receive(message)
                self._send_statuses()
            elif isinstance(message, DropPrefixes):
                self._engine.scheduler.prefixes.forget()
                done = Done(message.id)
            elif isinstance(message, ReadSample):
                done = self._engine.read_sample(message)
            else:
                done = self._end_requests(message)
        except SRMError as error:
            self._send(client, refusal(message.id, error))
            return
        if isinstance(message, Pause) and message.waits:
            self._waiting_pauses.append((client, done))
        else:
            self._send(client, done)

    def _end_requests(self, message: EndRequests) -> Done:
        """End those that are meant; the engine must be settled."""

        def is_meant(request: Request) -> bool:
            if message.names is None:
                return not request.durable
            is_its = request.name in message.names and request.share == message.share
            return is_its and not request.durable

        running = self._engine.scheduler.registry.by_id.items()
        ended = [id for id, group in running if is_meant(group.request)]
        outputs = [output for id in ended for output in self._engine.end(id)]
        self._send_outputs(outputs)
        sequences, version = len(outputs), self._engine.weights_version
        waiting = self._compiling.drop_all(is_meant)
        for own in waiting:
            id, indices = own.request.id, range(own.request.params.n)
            ends = [Output(id, index, finish_reason="abort") for index in indices]
            self._send(own.client, Outputs(ends, weights_version=version))
            sequences += len(ends)
        return Done(message.id, {"requests": len(ended) + len(waiting), "sequences": sequences})

    def _check_may_pause(self, message: Pause | Resume) -> None:
        if isinstance(message, Resume):
            return
        if self._deadline is not None:
            raise EngineUnavailable("the engine is draining: what runs is not paused")
        change = self.weight_reload.current
        stands_still = self._is_paused and self._engine.scheduler.is_quiet
        if change is not None and change.running == "finish" and not stands_still:
            raise SwapInProgress(
                f"the weights are being changed for those in {change.path!r} with running = "
                "'finish', which waits for what a pause would stop: pause when they are changed, "
                "or change them with 'continue' or 'drop'"
            )

    def _send_statuses(self) -> None:
        for identity in self.clients:
            self._send_status(identity)

    def _change_weights(self) -> None:
        if (message := self.weight_reload.current) is None:
            return
        client = self._owner.get(message.id)  # None: it does not wait any more
        try:
            is_draining = self._deadline is not None
            if is_draining or not self.weight_reload.is_due():
                self.weight_reload.check_wanted(client is not None, is_draining)
                if client is not None and (staged := self.weight_reload.take_staged()):
                    self._send(client, staged)
                return
            self._send_outputs(self._engine.settle())
            self._owner.pop(message.id, None)
            done = self.weight_reload.make(partial(self._end_requests, EndRequests(message.id)))
            if message.running == "drop":
                request_ids = [*self._owner]
                self._refuse_all(EngineUnavailable("other weights were put to use meanwhile"))
                for request_id in request_ids:
                    self._engine.abort(request_id)
            self._durable.forget()
        except StepFailed:
            raise
        except SRMError as error:
            self._owner.pop(message.id, None)
            if client is not None:
                self._send(client, refusal(message.id, error))
            return
        self._pausing.renew()
        self._send_statuses()
        if client is not None:
            self._send(client, done)

    def _add_compiled(self) -> None:
        """Add the requests whose constraints are compiled now."""
        for waiting, error in self._compiling.take_compiled():
            client, request = waiting.client, waiting.request
            try:
                if error is not None:
                    raise error
                self._add(client, request)
            except (RequestError, EngineUnavailable) as refused:
                self._send(client, refusal(request.id, refused))
                continue
            for message in waiting.choices:
                self._choose_samples(client, message)

    def _receive_request(self, client: bytes, request: Request) -> None:
        """Add a request, or have its constraint compiled first. Its time counts from now on."""
        try:
            if self._deadline is not None or not self._compiling.start(client, request):
                self._add(client, request)
        except (RequestError, EngineUnavailable) as error:
            self._send(client, refusal(request.id, error))
            return
        if self._config.request_timeout_s and not request.durable:
            due = time.monotonic() + self._config.request_timeout_s
            self._time_out.append((due, client, request.id))

    def _add(self, client: bytes, request: Request) -> None:
        if self._deadline is not None:
            raise EngineUnavailable("the engine is draining and takes no new requests")
        if request.emit == "tokens":
            request = self._numbered(client, request)
        self._engine.add(request)
        self._owner[request.id] = client
        if request.durable:
            self._durable_ids.add(request.id)
            self._durable.accepted(request.id)

    def _numbered(self, client: bytes, request: Request) -> Request:
        if not 0 <= request.stream < STREAMS:
            raise InvalidRequest(f"stream must be 0 … 2**40 - n, got {request.stream}", "stream")
        stream = (self.clients.number(client) << STREAM_BITS) + request.stream
        return msgspec.structs.replace(request, stream=stream)

    def _choose_samples(self, client: bytes, message: StopSamples | StartSamples) -> None:
        if self._owner.get(message.id) != client:
            self._compiling.note(client, message)
            return
        if isinstance(message, StartSamples):
            self._engine.start_below(message.id, message.below)
            return
        whole = len(message.indices) - len(message.indices) % 4
        indices = np.frombuffer(message.indices[:whole], "<i4")
        self._engine.stop(message.id, indices, message.cut)
        if not self._engine.has_request(message.id):
            self._forget(message.id)

    def _refuse_malformed(self, client: bytes, payload: bytes, error: Exception) -> None:
        """Answer a malformed message if it has an id at least, since its sender may be waiting."""
        logger.warning("ignored a malformed message of %d bytes: %s", len(payload), error)
        try:
            named = msgspec.msgpack.decode(payload, type=_Named)
        except UNDECODABLE:
            return
        if named.id not in self._owner:
            self._send(client, refusal(named.id, RequestError(f"malformed message: {error}")))

    def _drop_dead_clients(self) -> None:
        for client in self.clients.gone(self._send_status):
            if any(self._owner[request_id] == client for request_id in self._durable_ids):
                self._send_outputs(self._engine.settle())
            self.clients.forget(client)
            self._compiling.drop_client(client)
            request_ids = [name for name, owner in self._owner.items() if owner == client]
            if request_ids:
                logger.warning("ended %d requests of a client that is gone", len(request_ids))
            if durable_ids := self._durable_ids.intersection(request_ids):
                self._durable.keep(durable_ids)  # for its successor
            for request_id in request_ids:
                self._engine.abort(request_id)
                self._forget(request_id)

    def _end_overdue(self) -> None:
        """Abort requests that timed out; ids are not used twice."""
        while self._time_out and self._time_out[0][0] < time.monotonic():
            _, client, request_id = self._time_out.popleft()
            error = TimedOut(f"it took longer than {self._config.request_timeout_s:g} s")
            if self._owner.get(request_id) == client:
                self._refuse(request_id, error)
                self._engine.abort(request_id)
            elif self._compiling.drop(client, request_id):
                self._send(client, refusal(request_id, error))

    def _send_outputs(self, outputs: list[Output]) -> None:
        """Send one message per client, however many of its sequences moved."""
        by_client: defaultdict[bytes, list[Output]] = defaultdict(list)
        for output in outputs:
            by_client[self._owner[output.id]].append(output)
        steps, version = self._engine.take_tokens(), self._engine.weights_version
        for step in steps:
            for number, own in step.split(STREAM_BITS):
                # All requests of a client that is gone were aborted, so every row has a client.
                client = self.clients.of_number(number)
                its_outputs = by_client.pop(client, [])
                tokens = own.tokens.to_wire()
                self._send(client, Outputs(its_outputs, tokens, own.cached, version))
        for client, its_outputs in by_client.items():
            self._send(client, Outputs(its_outputs, weights_version=version))
        for output in outputs:
            if output.finish_reason is not None and not self._engine.has_request(output.id):
                self._forget(output.id)
        for step in steps:
            for request_id in step.finished:
                self._forget(request_id)

    def _forget(self, request_id: str) -> bytes | None:
        """Forget whose this request is; return the client, if there was one."""
        self._durable_ids.discard(request_id)
        return self._owner.pop(request_id, None)

    def _send_status(self, client: bytes) -> bool:
        status = self.weight_reload.add_status(self._engine.status())
        if self._deadline is not None:
            status = msgspec.structs.replace(status, state="draining")
        if self._is_paused:
            status = msgspec.structs.replace(status, paused=True)
        return self._send(client, status)

    def _refuse_all(self, error: SRMError) -> None:
        for request_id in list(self._owner):
            self._refuse(request_id, error)
        for waiting in self._compiling.drop_all():
            self._send(waiting.client, refusal(waiting.request.id, error))

    def _refuse(self, request_id: str, error: SRMError) -> None:
        if (client := self._forget(request_id)) is not None:
            sampled = self._engine.scheduler.count_sampled(request_id)
            self._send(client, refusal(request_id, error, sampled))

    def _answer(self, client: bytes, message_id: str, result: Detail | SnapshotError) -> None:
        if isinstance(result, SnapshotError):
            self._send(client, refusal(message_id, result))
        else:
            self._send(client, Done(message_id, result))

    def _send(self, client: bytes, message: FromEngine) -> bool:
        return self.clients.send(client, self._encoder.encode(message))


def serve(engine: Engine, config: EngineWiring, load: LoadFolder = load_checkpoint) -> int:
    """Serve until SIGTERM or SIGINT; return the exit code. For the main thread only."""
    watchdog = Watchdog(config.step_timeout_s)
    heartbeat = Heartbeat(config.heartbeat_fd) if config.heartbeat_fd >= 0 else None

    def progress() -> None:
        watchdog.note_progress()
        if heartbeat is not None:
            heartbeat.beat(engine.num_steps)

    process = EngineProcess(engine, config, progress=progress, load=load)

    def stop(signal_number: int, _frame: FrameType | None) -> None:
        logger.info("%s: draining", signal.Signals(signal_number).name)
        process.drain()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    logger.info("ready on %s", config.endpoint)
    metrics.STARTING_SINCE.set(0)
    try:
        return process.run()
    finally:
        watchdog.stop()
