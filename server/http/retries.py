"""A retry of a request that timed out gets the running one's reply, instead of starting it anew.

OpenAI's SDKs close a connection that has been silent for their time-out and send the same request
again after 0.5 to 8 seconds, with `x-stainless-retry-count` above 0. Here:

- A client that goes away is taken to have timed out if it says after how long it does
  (`x-stainless-read-timeout`), about that time has passed since its body was complete, and nothing
  of the reply has been sent. Its request then runs on for `grace_s`. In every other case the
  request ends at once, so that whoever leaves frees the slots by the next step. It also ends as
  soon as somebody else waits for slots that it holds.
- A retry with the same bytes, path and key takes that request over, whether it still runs or its
  reply lies ready. It also takes over one whose client ought to have given up by now, though its
  connection still seems to be there. It never takes over a request that somebody may be waiting
  for, so equal requests of several clients remain several.

Requests are kept by one API process: a retry that reaches another process starts anew. An upload is
never kept, since it is too large to be. Knows no completions: it moves the two ends of an ASGI
conversation.
"""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.errors import TimedOut
from server.http.bodies import is_upload
from server.http.headers import headers_of
from server.http.request_log import CURRENT
from server.http.responses import until_gone

TIMED_OUT = 0.9
"""Fraction of its time-out after which a client that leaves counts as timed out; below 1, since its
clock and ours do not start at the same moment."""

MAX_ALONE_BYTES = 64 * 1024**2
"""Most bytes of bodies whose clients have gone. Beyond them nothing waits for a retry."""

SERVICE_UNAVAILABLE = 503
_Likeness = tuple[str, str, int]  # path, key's name, length of the body


class Retries:
    """ASGI middleware around the routes; `grace_s` is in seconds."""

    def __init__(self, app: ASGIApp, grace_s: float) -> None:
        self._app = app
        self._grace_s = grace_s
        self._running: defaultdict[_Likeness, list[_Running]] = defaultdict(list)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        timeout_s = read_timeout_s(scope)
        if not self._grace_s or timeout_s is None or is_upload(scope):
            await self._app(scope, receive, send)
            return
        body = await Request(scope, receive).body()
        account = CURRENT.get().account
        likeness = (scope["path"], account.name if account else "", len(body))
        running = self._find(likeness, body) if is_retry(scope) else None
        if running is None:
            running = self._start(likeness, scope, body, timeout_s)
        elif running.leave is not None:
            running.leave.set()
        running.timeout_s, running.since = timeout_s, _now()
        await self._attend(running, receive, send)
        scope["route"] = running.scope.get("route")
        if running.entry is not CURRENT.get():
            CURRENT.get().take_over(running.entry)

    def _find(self, likeness: _Likeness, body: bytes) -> _Running | None:
        for running in self._running.get(likeness, ()):
            if not running.is_begun and running.has_timed_out and running.body == body:
                return running
        return None

    def _has_room(self, running: _Running) -> bool:
        alone = (waiting for many in self._running.values() for waiting in many if waiting.is_alone)
        return sum(len(waiting.body) for waiting in alone) + len(running.body) <= MAX_ALONE_BYTES

    def _start(self, likeness: _Likeness, scope: Scope, body: bytes, timeout_s: float) -> _Running:
        running = _Running(scope, body, timeout_s)

        async def run() -> None:
            await self._app(scope, running.receive, running.send)

        running.task = asyncio.create_task(run())
        self._running[likeness].append(running)

        def forget(task: asyncio.Task[None]) -> None:
            self._running[likeness].remove(running)
            if not self._running[likeness]:
                del self._running[likeness]
            if not task.cancelled():
                task.exception()  # whoever attends to it has it; nobody may

        running.task.add_done_callback(forget)
        return running

    async def _attend(self, running: _Running, receive: Receive, send: Send) -> None:
        """Give a client the reply. Raises ClientDisconnect, and TimedOut if a retry takes over."""
        leave = running.attach(send)
        gone = asyncio.create_task(until_gone(receive))
        left = asyncio.create_task(leave.wait())
        try:
            await asyncio.wait({running.task, gone, left}, return_when=asyncio.FIRST_COMPLETED)
            if running.task.done():
                running.task.result()
                return
            if left.done():
                raise TimedOut("a retry of this request has taken it over")
            if not running.is_begun and running.has_timed_out and self._has_room(running):
                running.wait_for_retry(self._grace_s)
                raise ClientDisconnect
            running.end()
            await running.task
            raise ClientDisconnect
        except asyncio.CancelledError:  # a stop: what runs may answer its client in its own way
            running.task.cancel()
            await asyncio.gather(running.task, return_exceptions=True)
            raise
        finally:
            gone.cancel()
            left.cancel()
            await asyncio.gather(gone, left, return_exceptions=True)


class _Running:
    """One request, and the client that it is answered to, if there is one."""

    task: asyncio.Task[None]

    def __init__(self, scope: Scope, body: bytes, timeout_s: float) -> None:
        self.scope = scope
        self.body = body
        self.timeout_s = timeout_s
        self.since = _now()
        self.is_begun = False
        """Whether a client has had the beginning of the reply."""
        self.leave: asyncio.Event | None = None
        """Set to tell the client's `_attend` that another client is here."""
        self.entry = CURRENT.get()
        self._send: Send | None = None
        self._has_client = asyncio.Event()
        self._has_ended = asyncio.Event()
        self._is_read = False
        self._expiry: asyncio.TimerHandle | None = None

    @property
    def is_alone(self) -> bool:
        """Whether it runs on without a client."""
        return not self._has_client.is_set()

    @property
    def has_timed_out(self) -> bool:
        return _now() - self.since >= TIMED_OUT * self.timeout_s

    def attach(self, send: Send) -> asyncio.Event:
        """Answer this client from now on; the returned event is set when another takes over."""
        if self._expiry is not None:
            self._expiry.cancel()
            self._abandon(False)
        self._send = send
        self.leave = asyncio.Event()
        self._has_client.set()
        return self.leave

    def wait_for_retry(self, grace_s: float) -> None:
        """Hold back the reply for the timed-out client's retry; end if none comes in `grace_s`."""
        self._has_client.clear()
        self._abandon(True)
        self._expiry = asyncio.get_running_loop().call_later(grace_s, self.end)

    def _abandon(self, is_alone: bool) -> None:
        """Tell the engine whether it is alone: meanwhile its slots go to whoever waits for some."""
        if self.entry.stream is not None:
            self.entry.stream.abandon(is_alone)

    def end(self) -> None:
        """End the request, which nobody waits for: to the routes, its client has gone away."""
        self._has_ended.set()
        self._has_client.set()  # for what is held back, which nobody will get
        self.is_begun = True  # too late for another client
        if not self._is_read:
            self.task.cancel()

    async def receive(self) -> Message:
        if not self._is_read:
            self._is_read = True
            return {"type": "http.request", "body": self.body, "more_body": False}
        await self._has_ended.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if self.is_alone and message.get("status") == SERVICE_UNAVAILABLE:
            self.end()  # others had its slots: a retry begins anew
        await self._has_client.wait()
        if self._has_ended.is_set():
            return
        assert self._send is not None
        self.is_begun = True
        await self._send(message)


def read_timeout_s(scope: Scope) -> float | None:
    """Return the seconds of silence after which the client of a POST gives up, if it says so."""
    if scope["type"] != "http" or scope["method"] != "POST":
        return None
    headers = headers_of(scope)
    given = headers.get("x-stainless-read-timeout") or headers.get("x-stainless-timeout") or ""
    try:
        seconds = float(given)
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) and seconds > 0 else None


def is_retry(scope: Scope) -> bool:
    count = headers_of(scope).get("x-stainless-retry-count", "")
    return count.isdecimal() and int(count[:9]) > 0


def _now() -> float:
    return asyncio.get_running_loop().time()
