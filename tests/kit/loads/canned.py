"""`python -m tests.kit.loads.canned`: a server that answers all requests with one canned stream.

The server costs next to nothing, so what a benchmark measures is the client. It computes nothing,
and waits as long as it is told between a reply's first token and the others. Several can share a
port.
"""

from __future__ import annotations

import asyncio
import re
import resource
import signal
import sys
from typing import cast

import msgspec
import uvloop

from srm.settings import load

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_MODELS = b'{"object":"list","data":[{"id":"canned","object":"model"}]}'
_USAGE = b'"usage":{"prompt_tokens":32,"completion_tokens":%d,"total_tokens":%d}'
_FRAME = (
    b'data: {"id":"cmpl-0","object":"text_completion","created":1,"model":"canned","choices":[%b],'
    b"%b}\n\n"
)
_CHOICE = b'{"index":0,"text":" token","logprobs":null,"finish_reason":null,"token_ids":[7]}'
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\n%b\r\n"


class Canned(msgspec.Struct, frozen=True):
    """Settings of the canned server."""

    port: int = 8001
    """To listen on, on 127.0.0.1; 0: any."""
    max_tokens: int = 16
    """Events with a token in each reply."""
    seconds: float = 0.0
    """From a reply's first token to the others."""


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class _Connection(asyncio.Protocol):
    def __init__(self, config: Canned) -> None:
        token = _chunk(_FRAME % (_CHOICE, b'"usage":null'))
        count = config.max_tokens
        last = _FRAME % (b"", _USAGE % (count, 32 + count))
        self._first = _HEAD % (b"text/event-stream", b"transfer-encoding: chunked\r\n") + token
        self._rest = token * (count - 1) + _chunk(last) + _chunk(b"data: [DONE]\n\n") + _chunk(b"")
        self._hold_s = config.seconds
        self._held = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        self._held += data
        head, result, body = self._held.partition(b"\r\n\r\n")
        length = _LENGTH.search(head)
        if not result or (length and len(body) < int(length[1])):
            return
        self._held = b""
        if head.startswith(b"GET"):
            kind = _HEAD % (b"application/json", b"content-length: %d\r\n" % len(_MODELS))
            self._transport.write(kind + _MODELS)
        elif b'"prompt"' not in body:  # whether the route is there
            self._transport.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")
        elif self._hold_s:
            self._transport.write(self._first)
            asyncio.get_running_loop().call_later(self._hold_s, self._transport.write, self._rest)
        else:
            self._transport.write(self._first + self._rest)


async def _serve(config: Canned) -> None:
    loop = asyncio.get_running_loop()
    over = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, over.set)
    server = await loop.create_server(
        lambda: _Connection(config), "127.0.0.1", config.port, reuse_port=True, backlog=65_535
    )
    port = server.sockets[0].getsockname()[1]
    sys.stdout.write(f"Serving canned on http://127.0.0.1:{port}\n")
    sys.stdout.flush()
    await over.wait()
    server.close()


if __name__ == "__main__":
    _, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (_hard, _hard))
    uvloop.run(
        _serve(load(Canned, sys.argv[1:], environ={}, prog="python -m tests.kit.loads.canned"))
    )
