"""Fleet: gives the lines of this process's batches to its own engine and to other servers.

The process stays the only owner of its batches: it alone reads their input and writes their
results, so a line that was sent twice still has one result. A server that goes away loses nothing
but the lines that it had, which are sent elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial

import httpx

from srm.engine.client.client import EngineClient
from srm.errors import Overloaded
from srm.server import metrics
from srm.server.batch.engine_retry import EngineRetry
from srm.server.batch.lines import Answerer, BatchLine, LineResult
from srm.server.batch.remote_worker import (
    MAX_LINE_BYTES,
    NotTaken,
    RemoteWorker,
    StaysHere,
    new_http,
)
from srm.server.http.keys import read_key
from srm.server.routes.worker import WorkerIdentity
from srm.server.schema.worker import Identity
from srm.server.wiring import ServerWiring
from srm.tasks import task_group

log = logging.getLogger(__name__)

MAX_LOSSES = 2
"""Servers that may be lost with a line; then it stays here, where what kills engines is found."""
LATE_S = 10.0
"""Seconds after which a line that is not taken counts as lost."""
MAX_ADDRESSES = 256
"""Most addresses of a name that are looked at, the smallest ones."""
_LOOK_EVERY_S = 2.0
_RESOLVE_S = 5.0
"""Seconds that a name has to be resolved; others are resolved meanwhile."""

Ask = Callable[[Mapping[str, Answerer]], Awaitable[LineResult]]
"""Asks those who answer to answer a line."""


@dataclass(eq=False)
class OwnEngine:
    """This server's engine, as one of those that answer lines."""

    answerers: Mapping[str, Answerer]
    room: int = 0
    """Sequences that it may be given."""
    used: int = 0
    """Sequences that it has been given and that have not ended."""


class Fleet:
    """All that answer lines: this server's engine, and other servers if there are any."""

    def __init__(self, answerers: Mapping[str, Answerer], sending: EngineRetry) -> None:
        self.own = OwnEngine(answerers)
        self.workers: dict[str, RemoteWorker] = {}
        """Other servers by their addresses."""
        self._sending = sending
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._unresolved: set[str] = set()
        self._has_looked = asyncio.Event()
        self._has_looked.set()  # unless `watch` is to look first

    @property
    def room(self) -> int:
        """Sequences that may be in flight."""
        return self.own.room + sum(worker.room for worker in self.workers.values())

    async def answer(self, line: BatchLine, ask: Ask) -> LineResult:
        """Have a line answered wherever there is room for it, and again elsewhere if it is lost.

        Raises what EngineRetry does: only this server's engine decides that a line cannot be run.
        """
        loop = asyncio.get_running_loop()
        losses, stays = 0, not _is_sendable(line.body)
        while True:
            worker = await self._choose(line.size, stays)
            place = worker or self.own
            place.used += line.size
            sent_at = loop.time()
            try:
                if worker is None:
                    return await self._sending.until_answered(partial(ask, self.own.answerers))
                result = await ask(worker.answerers)
                worker.answered += line.size
                metrics.BATCH_REMOTE_LINES.labels("answered").inc()
                return result
            except (NotTaken, Overloaded):
                place.room = 0  # until it is asked again
                if loop.time() - sent_at > LATE_S:  # or it keeps lines for ever that it never takes
                    losses += 1
                    stays = losses == MAX_LOSSES
                metrics.BATCH_REMOTE_LINES.labels("not_taken").inc()
            except Exception as error:  # of another server: whatever it is, it is no answer
                if worker is None:
                    raise
                losses, worker.answered = losses + 1, 0
                stays = losses == MAX_LOSSES or isinstance(error, StaysHere)
                metrics.BATCH_REMOTE_LINES.labels("lost").inc()
            finally:
                place.used -= line.size
                self._wake(1)

    async def watch(self, config: ServerWiring, client: EngineClient) -> None:
        """Keep looking which servers there are and what room they have, until cancelled.

        Whatever is wrong with that, what runs here goes on without them.
        """
        self._has_looked.clear()  # lines wait for the first look, though not for a silent server
        asyncio.get_running_loop().call_later(_LOOK_EVERY_S, self._has_looked.set)
        logged = ""
        while True:
            try:
                await self._watch(config, client)
            except Exception as error:
                why = f"{type(error).__name__}: {error}"
                if why != logged:
                    log.exception("batch_workers: other servers are sent no lines: %s", why)
                logged = why
            for worker in self.workers.values():
                worker.close("nobody looks what it is")
            self._wake(len(self._waiting))
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _watch(self, config: ServerWiring, client: EngineClient) -> None:
        identity, key = WorkerIdentity(config), read_key(config.batch_worker_key_file)
        async with new_http() as http:
            while True:
                if (status := client.status) is not None:
                    await self.find(config.batch_workers, http)
                    await self.look(identity.now(status), status.n_ctx, key, identity.instance)
                    metrics.BATCH_WORKERS.set(
                        sum(worker.room > 0 for worker in self.workers.values())
                    )
                    self._has_looked.set()
                await asyncio.sleep(_LOOK_EVERY_S)

    async def find(self, urls: tuple[str, ...], http: httpx.AsyncClient) -> None:
        """Find the addresses of the servers. What a name had stays while it cannot be resolved."""
        workers: dict[str, RemoteWorker] = {}
        answers = await asyncio.gather(*map(_resolved, urls), return_exceptions=True)
        for text, answer in zip(urls, answers, strict=True):
            url = httpx.URL(text)
            if isinstance(answer, BaseException):
                why = getattr(answer, "strerror", None) or str(answer) or "no answer"
                if text not in self._unresolved:
                    log.warning("batch_workers: %s cannot be resolved: %s", text, why)
                self._unresolved.add(text)
                workers |= {
                    key: worker for key, worker in self.workers.items() if worker.url == url
                }
                continue
            self._unresolved.discard(text)
            for address in answer[:MAX_ADDRESSES]:
                workers[address] = self.workers.get(address) or RemoteWorker(http, address, url)
        self.workers = workers

    async def look(self, identity: Identity, n_ctx: int, key: str, own: str) -> None:
        """Ask all servers at once. Of several addresses of one, that in use stays in use."""
        known = {
            worker.instance: worker.address for worker in self.workers.values() if worker.instance
        }
        known[own] = "this server"
        async with task_group() as group:
            for worker in self.workers.values():
                group.create_task(worker.look(identity, n_ctx, key, known))
        self._wake(len(self._waiting))

    async def _choose(self, size: int, stays: bool) -> RemoteWorker | None:
        """Wait until somebody has room; None stands for this server's engine."""
        await self._has_looked.wait()
        while True:
            # What is larger than all room here comes when it may: the limiter has seen to that.
            if not self.workers or size > self.own.room:
                return None
            choices: list[tuple[float, RemoteWorker | None]] = []
            if self.own.used + size <= self.own.room and (stays or self._sending.is_ready):
                choices.append((self.own.used / self.own.room, None))
            if not stays:
                choices += [
                    (worker.used / worker.room, worker)
                    for worker in self.workers.values()
                    if worker.used + size <= worker.room
                ]
            if choices:
                return min(choices, key=lambda place: place[0])[1]
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(waiter)
            await waiter

    def _wake(self, count: int) -> None:
        while count and self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                count -= 1


async def _resolved(text: str) -> list[str]:
    """Return a URL with the numeric addresses of its host, in order. Raises OSError, UnicodeError
    and httpx.InvalidURL."""
    url = httpx.URL(text)
    port = url.port or {"http": 80, "https": 443}[url.scheme]
    async with asyncio.timeout(_RESOLVE_S):
        answer = await asyncio.get_running_loop().getaddrinfo(
            url.host, port, type=socket.SOCK_STREAM
        )
    return sorted({str(url.copy_with(host=str(host), port=port)) for *_, (host, *_) in answer})


def _is_sendable(body: bytes) -> bool:
    try:
        body.decode()
    except UnicodeDecodeError:  # it is refused here as it is
        return False
    return len(body) <= MAX_LINE_BYTES
