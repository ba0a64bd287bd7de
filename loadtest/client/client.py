"""Sends requests over as few connections as it can, and records the replies.

All of it happens in callbacks of the event loop: a request costs no task unless it needs a new
connection.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from itertools import takewhile

from srm.errors import ConfigError
from srm.loadtest import recording
from srm.loadtest.client.connection import ClientConnection
from srm.loadtest.client.os_limits import exhausted
from srm.loadtest.client.reply import BadReply, TokenCounts
from srm.loadtest.client.request_attempt import RequestAttempt, Verdict, queue_seconds
from srm.loadtest.client.target import Target
from srm.loadtest.recording import RowBuffer
from srm.loadtest.scenario import Scenario
from srm.loadtest.workload.workload import RequestPlan


class Client:
    """The HTTP client of one process. `requests` and `events` grow as replies come."""

    def __init__(
        self,
        target: Target,
        scenario: Scenario,
        worker: int,
        started: float,
        on_end: Callable[[RequestAttempt, str], None],
        on_fatal: Callable[[ConfigError], None],
    ) -> None:
        """`started` is the time.monotonic() that all recorded times count from.

        `on_end` is called once per request, with its kind of error; `on_fatal` when this machine
        cannot go on. Of the scenario, `stream`, `timeout_s`, `retries` and `tokenizer` are used.
        """
        self._target = target
        self._scenario = scenario
        self._keep_text = scenario.tokenizer is not None
        self._worker = worker
        self._started = started
        self._on_end = on_end
        self._on_fatal = on_fatal
        self._loop = asyncio.get_running_loop()
        self._tls = target.context()
        self.idle: list[ClientConnection] = []
        """Connections that no request has."""
        self._connections: set[ClientConnection] = set()
        self._under_way: dict[int, RequestAttempt] = {}  # in the order of their deadlines
        self._on: dict[ClientConnection, RequestAttempt] = {}
        self._connecting: set[asyncio.Task[None]] = set()
        self._deadline: asyncio.TimerHandle | None = None
        self.requests = RowBuffer(recording.REQUEST)
        self.events = RowBuffer(recording.EVENT)
        self.texts: dict[int, list[str]] = {}
        """By request: the text of each choice, if tokens must be counted afterwards."""
        self.output_tokens = 0
        self.last_error = ""
        self.reasons: dict[str, str] = {}
        """By kind of error: the message of the first, in one line."""

    @property
    def in_flight(self) -> int:
        return len(self._under_way)

    def send(self, index: int, planned: float, asked: RequestPlan) -> None:
        """Send a request. Calls must be in the order of `planned`, in seconds since the start."""
        attempt = RequestAttempt(index, planned, asked)
        self._under_way[index] = attempt
        self._arm()
        self._dispatch(attempt)

    def cut(self) -> None:
        """End all requests under way, with the error `cut`."""
        now = time.monotonic()
        for attempt in list(self._under_way.values()):
            self._fail(attempt, "cut", "", now)

    async def close(self) -> None:
        """Close all connections and wait until they are closed. No request may be under way."""
        assert not self._under_way
        if self._deadline is not None:
            self._deadline.cancel()
        for task in self._connecting:
            task.cancel()
        await asyncio.gather(*self._connecting, return_exceptions=True)
        for connection in list(self._connections):
            connection.abort()
        while self._connections:  # transports report their end in a later iteration of the loop
            await asyncio.sleep(0.001)

    def _dispatch(self, attempt: RequestAttempt) -> None:
        while self.idle and not attempt.is_resent:
            connection = self.idle.pop()
            if connection.is_reusable:
                self._send_on(connection, attempt)
                return
        task = self._loop.create_task(self._connect(attempt))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect(self, attempt: RequestAttempt) -> None:
        target = self._target
        try:
            _, connection = await self._loop.create_connection(
                lambda: ClientConnection(self._connections.discard),
                target.address,
                target.port,
                ssl=self._tls,
                server_hostname=target.server_name or None,
            )
        except OSError as error:
            if (lack := exhausted(error, self._worker, len(self._connections))) is not None:
                self._on_fatal(lack)
            elif not attempt.is_over:
                self._fail(attempt, "connect", str(error), time.monotonic())
            return
        self._connections.add(connection)
        if attempt.is_over:  # its time ran out meanwhile
            self.idle.append(connection)
        else:
            self._send_on(connection, attempt)

    def _send_on(self, connection: ClientConnection, attempt: RequestAttempt) -> None:
        body = attempt.asked.body
        attempt.connection = connection
        self._on[connection] = attempt
        if math.isnan(attempt.sent):
            attempt.sent = time.monotonic() - self._started
        connection.send(b"%b%d\r\n\r\n%b" % (self._target.head, len(body), body), self)

    def body(self, connection: ClientConnection, data: bytes, now: float) -> None:
        """Take a part of a reply; called by a connection, as are `end_reply` and `broken`."""
        attempt = self._on[connection]
        time_s = now - self._started
        if not attempt.num_bytes:
            attempt.first_byte = time_s
        try:
            counts = attempt.receive(data, connection, self._scenario.stream, self._keep_text)
        except BadReply as error:
            self._fail(attempt, "protocol", str(error), now)
            return
        if counts:
            self._record(attempt.index, counts, time_s)

    def end_reply(self, connection: ClientConnection, now: float) -> None:
        attempt = self._on.pop(connection)
        attempt.connection = None
        verdict, counts = attempt.finish(connection)
        queue_s = queue_seconds(connection.headers)
        if connection.is_reusable:
            self.idle.append(connection)
        else:
            connection.abort()
        if counts:
            self._record(attempt.index, counts, now - self._started)
        if not math.isnan(verdict.retry_after_s) and attempt.retries < self._scenario.retries:
            self._loop.call_later(verdict.retry_after_s, self._retry, attempt)
            return
        self._end(attempt, verdict, now, queue_s)

    def broken(self, connection: ClientConnection, kind: str, message: str, now: float) -> None:
        attempt = self._on.pop(connection)
        attempt.connection = None
        if connection.is_unanswered_reuse and not attempt.is_resent:
            attempt.is_resent = True
            self._dispatch(attempt)
            return
        attempt.status = max(connection.status, 0)
        self._end(attempt, Verdict(kind, message), now)

    def _record(self, index: int, counts: TokenCounts, time_s: float) -> None:
        for choice, tokens in counts:
            self.events.append(index, choice, time_s, tokens)
            self.output_tokens += tokens

    def _retry(self, attempt: RequestAttempt) -> None:
        if not attempt.is_over:
            attempt.retries += 1
            attempt.is_resent = False
            attempt.begin()
            self._dispatch(attempt)

    def _arm(self) -> None:
        """Set one timer for all requests: the oldest under way is the next to time out."""
        if self._deadline is None and self._under_way:
            left = self._left(next(iter(self._under_way.values())))
            self._deadline = self._loop.call_later(max(left, 0.001), self._expire)

    def _left(self, attempt: RequestAttempt) -> float:
        return self._started + attempt.planned + self._scenario.timeout_s - time.monotonic()

    def _expire(self) -> None:
        self._deadline = None
        over = takewhile(lambda value: self._left(value) <= 0, self._under_way.values())
        for attempt in list(over):
            self._fail(attempt, "timeout", "", time.monotonic())
        self._arm()

    def _fail(self, attempt: RequestAttempt, kind: str, message: str, now: float) -> None:
        """End the request, whatever its connection is doing."""
        if (connection := attempt.connection) is not None:
            attempt.status = max(connection.status, 0)
            attempt.connection = None
            del self._on[connection]
            connection.abort()
        self._end(attempt, Verdict(kind, message), now)

    def _end(
        self, attempt: RequestAttempt, verdict: Verdict, now: float, queue_s: float = math.nan
    ) -> None:
        attempt.is_over = True
        del self._under_way[attempt.index]
        reply = attempt.reply
        if reply is not None:
            queue_s = queue_s if math.isnan(reply.queue_s) else reply.queue_s
            if reply.texts and not reply.is_counted:
                self.texts[attempt.index] = ["".join(parts) for parts in reply.texts.values()]
        if verdict.message:
            reason = "".join(char if char.isprintable() else " " for char in verdict.message)
            self.last_error = f"{verdict.kind}: {reason}"
            self.reasons.setdefault(verdict.kind, reason)
        self.requests.append(*attempt.row(self._worker, now - self._started, verdict.kind, queue_s))
        self._on_end(attempt, verdict.kind)
