"""RemoteWorker: another server that answers lines of our batches, over HTTP.

Lines that come within a moment share a request, whose answers come back as they end. The other
server is believed nothing: what it sends is bounded in bytes and time and checked, and a line that
it refuses is refused by this server or not at all.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from http.cookiejar import DefaultCookiePolicy
from typing import NamedTuple, get_args

import httpx
import msgspec

from srm.engine.messages import Refusal, error_of
from srm.errors import UNDECODABLE, EngineUnavailable, Overloaded, RequestError, SRMError
from srm.server.batch.worker_answers import Expected
from srm.server.generation.engine_request import RequestOwner
from srm.server.routes.worker import HEARTBEAT_S, differences
from srm.server.schema.worker import (
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
MAX_HELD_BYTES = 2**28
"""Most bytes of answers that have not ended, of one server: more are a broken server's."""
MAX_STATUS_BYTES = 64 * 1024
"""Most bytes of what a server says of itself, or in place of answers."""
FIRST_ROOM = 256
"""Sequences that a server is given before it has answered any, whatever it says of its room."""
SILENT_S = 60.0
"""Seconds without an answer after which the log says so."""
MAX_ANSWER_S = 1800.0
"""Seconds after which a line that has no answer is taken back, however alive the server seems: it
may wait there for people, and it may wait for ever."""
_END_S = 1.0
"""Seconds that a reply has to end once all its lines are answered."""
_LONGEST_PAUSE_S = 600.0
"""Most seconds that a server is not asked after it said what cannot be; twice as many each time."""
_LONGEST_REASON = 300
_LOOK_S = 5.0
"""Seconds that a server has to say what it is, while no other is asked again."""
_GATHER_S = 0.005
"""Seconds that a line waits for others to share a request with."""
_TIMEOUT = httpx.Timeout(30, connect=5, read=4 * HEARTBEAT_S, pool=None)
_OPEN = "it takes lines"
_decode_status = msgspec.json.Decoder(WorkerStatus).decode
_decode_answer = msgspec.json.Decoder(LineAnswer).decode
_NOTHING = LineAnswer()
_encode = msgspec.json.Encoder().encode


class NotTaken(Exception):
    """The other server did not take the line, which may be sent to any."""


class StaysHere(SRMError):
    """The line is to be answered by this server, whatever another said: it may have other limits,
    or lie."""


class _Untrue(Exception):
    """The other server said what no server of ours says."""


class _Sent(NamedTuple):
    """A line on its way."""

    line: WorkerLine
    expected: Expected
    answer: asyncio.Future[bytes]


def new_http() -> httpx.AsyncClient:
    """Make the client that all workers share; its connections, which are open files, are as many as
    lines need."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    http = httpx.AsyncClient(timeout=_TIMEOUT, limits=limits, trust_env=False)
    http.cookies.jar.set_policy(DefaultCookiePolicy(allowed_domains=[]))
    return http


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
        self.answered = 0
        """Sequences that it has answered since it lost one: it is given as many more."""
        self.held_bytes = 0
        """Bytes of answers that have not ended."""
        self._answered_at = 0.0
        self.instance = ""
        """The `instance` that the server reports, while it takes lines; else empty."""
        self.answerers = {path: _Route(self, path) for path in get_args(Url)}
        self._why = ""  # it was closed, as the log has it
        self._http = http
        self._identity: Identity = {}
        self._n_ctx = 0
        self._lies = 0  # in a row
        self._not_before = 0.0  # is it asked again
        self._headers: dict[str, str] = {}
        self._outbox: defaultdict[tuple[Url, RequestOwner], list[_Sent]] = defaultdict(list)
        self._sends: set[asyncio.Task[None]] = set()

    async def look(
        self, identity: Identity, n_ctx: int, key: str, instances: dict[str, str]
    ) -> None:
        """Ask the server what it is, and set `room`. `instances` has the addresses of those that
        are known already, this server among them; others are added. Raises nothing of its own."""
        if time.monotonic() < self._not_before:
            return
        self._identity, self._n_ctx = identity, n_ctx
        self._headers = {"host": self.url.netloc.decode(), "accept-encoding": "identity"}
        if key:
            self._headers["authorization"] = f"Bearer {key}"
        try:
            async with asyncio.timeout(_LOOK_S):
                status = await self._ask_status()
        except (NotTaken, _Untrue) as failed:
            self.close(str(failed))
            return
        except Exception as error:  # noqa: BLE001 - it closes this one, and nothing else
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
            self.room = max(1, min(window - others, FIRST_ROOM + self.answered))
            silent_s = time.monotonic() - self._answered_at
            if self.used and self._answered_at and silent_s > SILENT_S:
                log.warning("%s: has answered nothing for %.0f s", self.address, silent_s)
            if self._why != _OPEN:
                log.info("%s: takes lines of batches", self.address)
            self.instance, self._why = status.instance, _OPEN

    async def _ask_status(self) -> WorkerStatus:
        reply = await self._http.send(self._request("GET", "/v1/worker"), stream=True)
        try:
            reply_text = await _read(reply)
            if not reply.is_success:
                raise NotTaken(_describe(reply.status_code, reply_text))
            return _decode_status(reply_text)
        finally:
            await reply.aclose()

    def _distrust(self, why: str) -> None:
        """Close it for some time."""
        self._lies += 1
        pause_s = min(2.0**self._lies, _LONGEST_PAUSE_S)
        self._not_before = time.monotonic() + pause_s
        self.close(f"{why}; it is asked again in {pause_s:g} s")

    def close(self, why: str) -> None:
        """Give it no more lines, for this reason, until it has been asked again."""
        why = repr(why[:_LONGEST_REASON])[1:-1]  # in the log it is a line, whoever wrote it
        if why != self._why:
            log.warning("%s: is sent no lines of batches: %s", self.address, why)
        self.room, self.instance, self._why = 0, "", why

    async def answer(self, path: Url, body: bytes, id: str, owner: RequestOwner) -> bytes:
        """Have a line answered. Raises StaysHere if it is refused, EngineUnavailable if it is lost
        with the server, Overloaded and NotTaken; when cancelled, the server ends it."""
        model = self._identity.get("served_model_name", "")
        try:
            expected = Expected(path, body, id, owner.created_unix or 0, model, self._n_ctx)
        except RequestError as error:
            raise StaysHere(error.message) from None
        if not self._outbox:
            asyncio.get_running_loop().call_later(_GATHER_S, self._send_all)
        self._answered_at = self._answered_at if self.used > 1 else time.monotonic()
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._outbox[path, owner].append(_Sent(WorkerLine(id, body.decode()), expected, answer))
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
        waiting = {sent.line.id: sent for sent in group}
        task = asyncio.current_task()
        assert task is not None

        def ended(answer: asyncio.Future[bytes]) -> None:
            if answer.cancelled() and all(sent.answer.done() for sent in waiting.values()):
                task.cancel()  # nobody waits for any of them

        for sent in group:
            sent.answer.add_done_callback(ended)
        error: Exception = EngineUnavailable(f"{self.address} broke off the answer")
        is_lie = False
        try:
            async with asyncio.timeout(MAX_ANSWER_S) as limit:
                async with aclosing(self._answers(path, owner, group)) as events:
                    async for event in events:
                        self._take(event, waiting)
                        if not waiting:
                            limit.reschedule(asyncio.get_running_loop().time() + _END_S)
        except (httpx.ConnectError, httpx.ConnectTimeout) as failed:
            error = NotTaken(f"{type(failed).__name__}: {failed}")
        except (NotTaken, StaysHere, EngineUnavailable) as failed:
            error = failed
        except TimeoutError:
            error, is_lie = EngineUnavailable(f"no answer in {MAX_ANSWER_S:g} s"), bool(waiting)
        except (_Untrue, *UNDECODABLE) as failed:
            error, is_lie = EngineUnavailable(f"it said what cannot be: {failed}"), True
        except Exception as failed:  # noqa: BLE001 - as in `look`
            error = EngineUnavailable(f"{type(failed).__name__}: {failed}")
        finally:
            lost = [sent.answer for sent in waiting.values() if not sent.answer.done()]
            if is_lie:
                self._distrust(str(error))
            elif lost:
                self.close(str(error))
            for answer in lost:
                answer.set_exception(error)

    def _take(self, event: LineAnswer, waiting: dict[str, _Sent]) -> None:
        """Give an answer to who waits for it. Raises _Untrue if it is none."""
        sent = waiting.get(event.id)
        if sent is None:
            raise _Untrue("an answer to a line that it does not have")
        body = bytes(event.body)
        if event.refusal is None:
            try:
                sent.expected.check(body)
            except UNDECODABLE as error:
                raise _Untrue(f"a line's answer is none: {error}") from None
            self._lies = 0
        self._answered_at = time.monotonic()
        del waiting[event.id]
        if sent.answer.done():  # nobody waits for it any more
            return
        if event.refusal is not None:
            sent.answer.set_exception(_refused(event.refusal))
        else:
            sent.answer.set_result(body)

    async def _answers(
        self, path: Url, owner: RequestOwner, group: list[_Sent]
    ) -> AsyncGenerator[LineAnswer, None]:
        """Send lines and yield the answers of the reply. Raises NotTaken, StaysHere for lines that
        are too long for it, _Untrue, and what httpx does."""
        asked = LinesRequest(
            url=path,
            identity=self._identity,
            share=owner.share,
            weight=owner.weight,
            priority=owner.priority,
            created_unix=owner.created_unix or 0,
            lines=[sent.line for sent in group],
        )
        most = MAX_STATUS_BYTES + max(sent.expected.max_bytes for sent in group)
        request = self._request("POST", "/v1/worker/lines", _encode(asked))
        response = await self._http.send(request, stream=True)
        rest = bytearray()
        num_idle = 0  # bytes that answer nothing
        try:
            if not response.is_success:
                reply_text = _describe(response.status_code, await _read(response))
                if response.status_code == 413:  # it will say so again
                    raise StaysHere(f"{self.address}: {reply_text}")
                raise NotTaken(reply_text)
            async for chunk in _raw(response):
                seen = max(0, len(rest) - 1)
                rest += chunk
                self.held_bytes += len(chunk)
                if rest.find(b"\n\n", seen) < 0:  # an event may be long: it is not looked at anew
                    if len(rest) > most or self.held_bytes > MAX_HELD_BYTES:
                        raise _Untrue(f"an answer of more than {len(rest)} bytes")
                    continue
                *events, last = bytes(rest).split(b"\n\n")
                self.held_bytes += len(last) - len(rest)
                rest = bytearray(last)
                for event in events:
                    data = event.removeprefix(b"data: ")
                    answer = _decode_answer(data) if data.startswith(b"{") else _NOTHING
                    if answer.id:
                        yield answer
                        continue
                    num_idle += len(event)
                    if num_idle > MAX_STATUS_BYTES:
                        raise _Untrue(f"more than {num_idle} bytes that answer nothing")
        finally:
            self.held_bytes -= len(rest)
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

    async def answer_whole(self, body: bytes, id: str, owner: RequestOwner) -> bytes:
        return await self.worker.answer(self.path, body, id, owner)


async def _raw(reply: httpx.Response) -> AsyncIterator[bytes]:
    """Yield the bytes of a reply as they come. Raises _Untrue if they are compressed."""
    if reply.headers.get("content-encoding", "identity") != "identity":
        raise _Untrue("a compressed reply")
    async for chunk in reply.aiter_raw():
        yield chunk


async def _read(reply: httpx.Response) -> bytes:
    """Return what a server says of itself, or why it takes no lines. Raises _Untrue."""
    data = bytearray()
    async for chunk in _raw(reply):
        data += chunk
        if len(data) > MAX_STATUS_BYTES:
            raise _Untrue(f"{reply.status_code} and more than {MAX_STATUS_BYTES} bytes")
    return bytes(data)


def _refused(refusal: Refusal) -> SRMError:
    """Return what a refusal of another server means for a line: its own limits are not ours."""
    error = error_of(refusal)
    is_of_now = isinstance(error, (Overloaded, EngineUnavailable))
    return error if is_of_now else StaysHere(refusal.message)


def _describe(status: int, data: bytes) -> str:
    """Return what a server said that does not take lines."""
    try:
        message = str(msgspec.json.decode(data)["error"]["message"])
    except (*UNDECODABLE, KeyError, TypeError):
        message = data[:200].decode(errors="replace")
    return f"{status}: {message}"
