"""RemoteWorker: another server that answers lines of our batches, over HTTP.

Lines that come within a moment share a request, whose answers come back as they end. Knows no files
and no results, and of the other server only what it says of itself.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import NamedTuple, get_args

import httpx
import msgspec

from engine.errors import UNDECODABLE, EngineUnavailable
from engine.messages import error_of
from server.generation.engine_request import RequestOwner
from server.routes.worker import HEARTBEAT_S, differences
from server.schema.worker import (
    MAX_LINES,
    Identity,
    LineAnswer,
    LinesRequest,
    Url,
    WorkerLine,
    WorkerStatus,
)

log = logging.getLogger(__name__)

MAX_LINE_BYTES = 256 * 1024
"""Longest body that is sent to another server, and most bytes of those that share a request."""
MAX_EVENT_BYTES = 2**29
"""Most bytes of an answer: one that does not end is a broken server's."""
_LOOK_S = 5.0
"""Seconds that a server has to say what it is, while no other is asked again."""
_GATHER_S = 0.005
"""Seconds that a line waits for others to share a request with."""
_TIMEOUT = httpx.Timeout(30, connect=5, read=4 * HEARTBEAT_S, pool=None)
_OPEN = "it takes lines"
_decode_status = msgspec.json.Decoder(WorkerStatus).decode
_decode_answer = msgspec.json.Decoder(LineAnswer).decode
_encode = msgspec.json.Encoder().encode


class NotTaken(Exception):
    """The other server did not take the line, which may be sent to any."""


class _Sent(NamedTuple):
    """A line on its way."""

    line: WorkerLine
    answer: asyncio.Future[bytes]


def new_http() -> httpx.AsyncClient:
    """Make the client that all workers share; its connections, which are open files, are as many as
    lines need."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    return httpx.AsyncClient(timeout=_TIMEOUT, limits=limits, trust_env=False)


class RemoteWorker:
    """One other server, at one address."""

    def __init__(self, http: httpx.AsyncClient, address: str, url: httpx.URL) -> None:
        """`address` is the URL with the host's numeric address, `url` that of the settings."""
        self.address = address
        self.url = url
        self.room = 0
        """Sequences that it may be given; 0 while it takes none."""
        self.used = 0
        """Sequences that it has been given and that have not ended."""
        self.instance = ""
        """The `instance` that the server reports, while it takes lines; else empty."""
        self.answerers = {path: _Route(self, path) for path in get_args(Url)}
        self._why = ""  # it was closed, as the log has it
        self._http = http
        self._identity: Identity = {}
        self._headers: dict[str, str] = {}
        self._outbox: defaultdict[tuple[Url, RequestOwner], list[_Sent]] = defaultdict(list)
        self._sends: set[asyncio.Task[None]] = set()

    async def look(self, identity: Identity, key: str, instances: dict[str, str]) -> None:
        """Ask the server what it is, and set `room`. `instances` has the addresses of those that
        are known already, this server among them; others are added."""
        self._identity = identity
        self._headers = {"host": self.url.netloc.decode()}
        if key:
            self._headers["authorization"] = f"Bearer {key}"
        try:
            async with asyncio.timeout(_LOOK_S):
                reply = await self._http.send(self._request("GET", "/v1/worker"))
            if not reply.is_success:
                self.close(_said(reply))
                return
            status = _decode_status(reply.content)
        except (httpx.HTTPError, TimeoutError, *UNDECODABLE) as error:
            self.close(f"{type(error).__name__}: {error}")
            return
        known = instances.setdefault(status.instance, self.address)
        if known != self.address:
            self.close(f"it is {known}")
        elif different := differences(identity, status.identity):
            self.close(different)
        else:
            # As many wait as run, less what others have there.
            window = status.num_slots + min(status.num_slots, status.max_waiting // 2)
            others = max(0, status.running + status.waiting - self.used)
            self.room = max(1, window - others)
            if self._why != _OPEN:
                log.info("%s: takes lines of batches", self.address)
            self.instance, self._why = status.instance, _OPEN

    def close(self, why: str) -> None:
        """Give it no more lines, for this reason, until it has been asked again."""
        if why != self._why:
            log.warning("%s: is sent no lines of batches: %s", self.address, why)
        self.room, self.instance, self._why = 0, "", why

    async def answer(self, path: Url, body: bytes, id: str, owner: RequestOwner) -> bytes:
        """Have a line answered. Raises the SRMError that it is refused with, EngineUnavailable if
        it is lost with the server, and NotTaken; when cancelled, the server ends it."""
        if not self._outbox:
            asyncio.get_running_loop().call_later(_GATHER_S, self._send_all)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._outbox[path, owner].append(_Sent(WorkerLine(id, body.decode()), answer))
        return await answer

    def _send_all(self) -> None:
        outbox, self._outbox = self._outbox, defaultdict(list)
        for (path, owner), lines in outbox.items():
            groups: list[list[_Sent]] = []
            size = 0
            for sent in lines:
                if sent.answer.done():  # nobody waits for it any more
                    continue
                size += len(sent.line.body)
                if not groups or len(groups[-1]) == MAX_LINES or size > MAX_LINE_BYTES:
                    groups.append([])
                    size = len(sent.line.body)
                groups[-1].append(sent)
            for group in groups:
                task = asyncio.create_task(self._send(path, owner, group))
                self._sends.add(task)
                task.add_done_callback(self._sends.discard)

    async def _send(self, path: Url, owner: RequestOwner, group: list[_Sent]) -> None:
        waiting = {sent.line.id: sent.answer for sent in group}
        task = asyncio.current_task()
        assert task is not None

        def ended(answer: asyncio.Future[bytes]) -> None:
            if answer.cancelled() and all(one.done() for one in waiting.values()):
                task.cancel()  # nobody waits for any of them

        for answer in waiting.values():
            answer.add_done_callback(ended)
        error: Exception = EngineUnavailable(f"{self.address} broke off the answer")
        try:
            async for event in self._answers(path, owner, [sent.line for sent in group]):
                found = waiting.pop(event.id, None)
                if found is None or found.done():
                    continue
                if b"\n" in bytes(event.body):  # a result is a line
                    found.set_exception(EngineUnavailable(f"{self.address} answered in lines"))
                elif event.refusal is not None:
                    found.set_exception(error_of(event.refusal))
                else:
                    found.set_result(bytes(event.body))
        except (httpx.ConnectError, httpx.ConnectTimeout) as failed:
            error = NotTaken(f"{type(failed).__name__}: {failed}")
        except (NotTaken, EngineUnavailable) as failed:
            error = failed
        except (httpx.HTTPError, *UNDECODABLE) as failed:
            error = EngineUnavailable(f"{self.address}: {type(failed).__name__}: {failed}")
        finally:
            lost = [answer for answer in waiting.values() if not answer.done()]
            if lost:
                self.close(str(error))
            for answer in lost:
                answer.set_exception(error)

    async def _answers(
        self, path: Url, owner: RequestOwner, lines: list[WorkerLine]
    ) -> AsyncIterator[LineAnswer]:
        """Send lines and yield the events of the reply. Raises NotTaken, EngineUnavailable for
        lines that are too long for it, and what httpx does."""
        asked = LinesRequest(
            url=path,
            identity=self._identity,
            share=owner.share,
            weight=owner.weight,
            priority=owner.priority,
            created_unix=owner.created_unix or 0,
            lines=lines,
        )
        request = self._request("POST", "/v1/worker/lines", _encode(asked))
        response = await self._http.send(request, stream=True)
        try:
            if not response.is_success:
                await response.aread()
                if response.status_code == 413:  # it will say so again
                    raise EngineUnavailable(f"{self.address}: {_said(response)}")
                raise NotTaken(_said(response))
            rest = bytearray()
            async for chunk in response.aiter_raw():
                seen = max(0, len(rest) - 1)
                rest += chunk
                if rest.find(b"\n\n", seen) < 0:  # an event may be long: it is not looked at anew
                    if len(rest) > MAX_EVENT_BYTES:
                        raise EngineUnavailable(
                            f"{self.address}: an answer of more than {MAX_EVENT_BYTES} bytes"
                        )
                    continue
                *events, last = bytes(rest).split(b"\n\n")
                rest = bytearray(last)
                for event in events:
                    data = event.removeprefix(b"data: ")
                    if data.startswith(b"{"):
                        yield _decode_answer(data)
        finally:
            await response.aclose()

    def _request(self, method: str, path: str, content: bytes | None = None) -> httpx.Request:
        headers = {**self._headers, "content-type": "application/json"}
        request = self._http.build_request(
            method, self.address + path, content=content, headers=headers
        )
        request.extensions["sni_hostname"] = self.url.host  # its certificate is the name's
        return request


class _Route(NamedTuple):
    """Answers the bodies of requests to one URL by a worker."""

    worker: RemoteWorker
    path: Url

    async def whole(self, body: bytes, id: str, sender: RequestOwner) -> bytes:
        return await self.worker.answer(self.path, body, id, sender)


def _said(reply: httpx.Response) -> str:
    """Return what a server said that does not take lines."""
    try:
        message = reply.json()["error"]["message"]
    except (*UNDECODABLE, KeyError, TypeError):
        message = reply.text[:200]
    return f"{reply.status_code}: {message}"
