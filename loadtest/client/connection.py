"""One HTTP/1.1 connection: sends a request's bytes, and reads the one reply to it.

An asyncio protocol around httptools' parser.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol, cast

import httptools

MAX_HEAD_BYTES = 2**20
"""Most bytes before a reply's body, those of 1xx replies included."""
UNREAD = -1
"""The status while no reply has begun."""


class Receiver(Protocol):
    """Receives a connection's reply; `now` is the time.monotonic() at which its bytes were read."""

    def body(self, connection: ClientConnection, data: bytes, now: float) -> None: ...

    def end_reply(self, connection: ClientConnection, now: float) -> None:
        """The reply has ended; the connection may be used again if `is_reusable`."""

    def broken(self, connection: ClientConnection, kind: str, message: str, now: float) -> None:
        """The reply will not be whole: `disconnected`, or `protocol` if it is not HTTP."""


class ClientConnection(asyncio.Protocol):
    """Carries one request at a time. `status` and `headers` are of the reply being read."""

    def __init__(self, on_lost: Callable[[ClientConnection], None]) -> None:
        """`on_lost` is called when the connection ends, whoever ended it."""
        self._on_lost = on_lost
        self.status = UNREAD
        self.headers: dict[bytes, bytes] = {}
        """By lower-case name; of a repeated header, the last."""
        self.is_reusable = True
        self.uses = 0
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)
        self._receiver: Receiver | None = None
        self._until_closed = False
        self._is_whole = False
        self._now = 0.0
        self._head_bytes = 0  # while there is no status

    @property
    def is_unanswered_reuse(self) -> bool:
        """Whether a request after the first got no byte: the server may have closed earlier."""
        return self.uses > 1 and self._now == 0.0

    def send(self, data: bytes, receiver: Receiver) -> None:
        """Send a whole request. The receiver gets its reply until `end_reply` or `broken`."""
        assert self._receiver is None, "one request at a time"
        self._receiver = receiver
        self.uses += 1
        self.status = UNREAD
        self.headers = {}
        self._until_closed = self._is_whole = False
        self._now = 0.0
        self._head_bytes = 0
        self._transport.write(data)

    def abort(self) -> None:
        """Close at once, without a call of the receiver."""
        self._receiver = None
        self.is_reusable = False
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        if self._receiver is None or self._parser is None:
            self.abort()  # nobody asked: a 408 for keeping it idle, say
            return
        self._now = time.monotonic()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError:
            raise  # a bug of ours
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not self._is_whole:
                self._break("protocol", f"not HTTP: {error}")
                return
            self.is_reusable = False  # bytes behind the reply
        if self._is_whole:
            self._end()
        elif self.status == UNREAD:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._break("protocol", f"more than {MAX_HEAD_BYTES} bytes before a body")

    def connection_lost(self, error: Exception | None) -> None:
        self._on_lost(self)
        parser, self._parser = self._parser, None  # it refers to us
        self.is_reusable = False
        if self._receiver is None or parser is None:
            return
        if self._until_closed and error is None:
            self._now = time.monotonic()
            self._end()
        else:
            self._break("disconnected", str(error or "the server closed the connection"))

    def _end(self) -> None:
        receiver, self._receiver = self._receiver, None
        if receiver is not None:  # it may have aborted meanwhile
            receiver.end_reply(self, self._now)

    def _break(self, kind: str, message: str) -> None:
        receiver, self._receiver = self._receiver, None
        self.is_reusable = False
        self._transport.abort()
        if receiver is not None:
            receiver.broken(self, kind, message, time.monotonic())

    # Callbacks of the parser. Any of them may be called before the reply proper, for a 1xx.

    def on_message_begin(self) -> None:
        if self._is_whole:
            self.is_reusable = False  # a reply that nobody asked for

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        if self._is_whole:
            return
        self.status = self._parser.get_status_code()
        self._until_closed = not {b"content-length", b"transfer-encoding"} & self.headers.keys()

    def on_body(self, data: bytes) -> None:
        if self._receiver is not None and not self._is_whole:
            self._receiver.body(self, data, self._now)

    def on_message_complete(self) -> None:
        if self.status < 200:
            self.headers = {}
            self.status = UNREAD
            self._until_closed = False
        elif not self._is_whole:
            assert self._parser is not None
            self._is_whole = True
            self.is_reusable = self.is_reusable and self._parser.should_keep_alive()
