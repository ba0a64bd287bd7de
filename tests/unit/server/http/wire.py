"""A connection of the server over no socket: what the app saw, and what was answered."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterable
from http.client import HTTPResponse
from io import BytesIO
from typing import Any, NamedTuple

import h11
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.server import ServerState

from srm.server.http.auth import Auth
from srm.server.http.connection import Connection
from srm.server.http.draining import Draining
from srm.server.http.keys import Keys
from srm.server.http.request_middleware import RequestMiddleware
from srm.server.wiring import ServerWiring

_TURNS = 12
"""Turns of the loop after which nothing moves any more: more than the app ever takes."""


class Seen(NamedTuple):
    """A request as the app has it, whole."""

    method: str
    target: str
    body: bytes


class Received(NamedTuple):
    seen: list[Seen]
    headers: list[dict[str, str]]
    """Of each request in `seen`."""
    replies: list[tuple[int, Any]]
    """Status and JSON of each."""
    is_closed: bool


class _Wire(asyncio.Transport):
    def __init__(self, of: socket.socket) -> None:
        super().__init__({"socket": of})
        self.sent = b""
        self.is_closed = self.is_paused = False

    def write(self, data: Any) -> None:
        assert not self.is_closed, "uvloop raises here"
        self.sent += data

    def close(self) -> None:
        self.is_closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    def get_write_buffer_size(self) -> int:
        return 0


class _Replies(BytesIO):
    """Read by one HTTPResponse after another."""

    def makefile(self, _mode: str) -> _Replies:
        return self

    def close(self) -> None:
        pass


async def send_pieces(pieces: Iterable[bytes], is_held: bool = False) -> Received:
    """Send these pieces, one after the other, and let all be answered that can be after each; where
    the app is held, when all have come."""
    may_answer = asyncio.Event()
    seen: list[Seen] = []
    headers: list[dict[str, str]] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        body = await request.body()
        target = request.url.path + ("?" + request.url.query if request.url.query else "")
        seen.append(Seen(request.method, target, body))
        headers.append(dict(request.headers))
        await may_answer.wait()
        await JSONResponse(len(seen))(scope, receive, send)

    config = ServerWiring(cors_origins=("*",))  # whatever `Host` is
    guard = Auth(app, config, Keys([]), lambda: 1, Draining())
    unconnected = socket.socket()
    state, wire = ServerState(), _Wire(unconnected)
    uvicorn = Config(RequestMiddleware(guard), ws="none", log_config=None, access_log=False)
    connection = Connection(config, uvicorn, state, {})
    connection.connection_made(wire)
    if not is_held:
        may_answer.set()
    for piece in pieces:
        if not wire.is_closed:
            connection.data_received(piece)
        await _turn()
        assert not wire.is_paused or wire.is_closed or is_held
    may_answer.set()
    await _turn()
    is_closed = wire.is_closed
    connection.connection_lost(None)
    unconnected.close()
    await asyncio.gather(*state.tasks)
    return Received(seen, headers, list(_replies(wire.sent)), is_closed)


async def _turn() -> None:
    for _ in range(_TURNS):
        await asyncio.sleep(0)


def _replies(sent: bytes) -> Iterable[tuple[int, Any]]:
    stream = _Replies(sent)
    while stream.tell() < len(sent):
        reply = HTTPResponse(stream)  # type: ignore[arg-type]  # of a socket it wants makefile alone
        reply.begin()
        yield reply.status, json.loads(reply.read())


def requests_by_h11(data: bytes) -> list[Seen]:
    """The requests that another parser finds before it refuses, each with a body that is whole."""
    seens: list[Seen] = []
    parser = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
    parser.receive_data(data)
    request, body = h11.Request(method="GET", target="/", headers=[("host", "")]), b""
    while True:
        try:
            event = parser.next_event()
        except h11.RemoteProtocolError:
            return seens
        match event:
            case h11.Request():
                request, body = event, b""
            case h11.Data():
                body += event.data
            case h11.EndOfMessage():
                seens.append(Seen(request.method.decode(), request.target.decode("latin-1"), body))
                parser.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
                parser.send(h11.EndOfMessage())
                if parser.our_state is not h11.DONE or parser.their_state is not h11.DONE:
                    return seens
                parser.start_next_cycle()
            case _:
                return seens
