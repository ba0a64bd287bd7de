"""One HTTP connection: uvicorn's, with limits and time-outs on what it leaves open.

Headers are limited in size and time; so is a client that does not read its reply, or keeps sending
what nobody reads. What is not HTTP at all is answered in our error shape. An offered upgrade is not
taken: the request is answered as if there were no offer (RFC 9110, 7.8).
"""

from __future__ import annotations

import asyncio
import logging
import resource
import time
import uuid
from http import HTTPStatus
from math import inf
from typing import Any, ClassVar

import httptools
import msgspec
from starlette.types import Message
from uvicorn._types import ASGIReceiveEvent
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)
from uvicorn.server import ServerState

from srm.errors import InvalidRequest
from srm.server.config import SPARE_FILES, ServerConfig
from srm.server.errors import ErrorBody, ErrorDetail
from srm.server.http.auth import TOO_MANY_CONNECTIONS
from srm.server.http.headers import check_head, path_of
from srm.server.http.responses import CONNECT

log = logging.getLogger(__name__)

LINGER_S = 2.0
"""Seconds for which the rest of a body is read after its reply, which could get lost otherwise."""

REFUSAL_S = 2.0
"""Seconds that a connection too many has to ask and be refused: others wait for its place."""
_SAY_AGAIN_S = 60.0

MAX_PIPELINED = 16
"""Requests that a client may send before the first is answered. Each takes some memory."""


class _HeadTooLarge(ValueError):
    """Ends the parser."""


class Connection(HttpToolsProtocol):
    """The connection of one client."""

    _logged_at: ClassVar[float] = -inf
    """When the log last said that there are too many."""

    def __init__(
        self,
        settings: ServerConfig,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._settings = settings
        self._is_in_head = True
        """Whether the next data is part of a request line or a header."""
        self._has_begun = False
        """Whether a request has begun that has not arrived whole."""
        self._has_advanced = False
        """Whether a head, a piece of a body or a request ended in the last data, not all of which
        then belongs to what comes next."""
        self._unanswered: list[RequestResponseCycle] = []
        """Requests without a whole reply, the oldest first. uvicorn tells only the newest one that
        its client has left."""
        self._head_bytes = 0
        """Bytes since the parser last advanced: of a head, of chunk extensions, of trailers."""
        self._refusal: bytes | None = None
        """What is sent once all in `_unanswered` are answered; from now on nothing is read."""
        self.body_fault = ""
        """What is wrong with the newest request's body, the rest of which will not come."""
        self._receiving: asyncio.TimerHandle | None = None
        self._sending: asyncio.TimerHandle | None = None
        self._unsent_bytes = 0

    @property
    def is_paused(self) -> bool:
        """Whether the client has read too slowly, and not yet read on."""
        return bool(self.flow.write_paused)

    def write(self, data: bytes) -> bool:
        """Send bytes as they are; return whether more may be. If not, the client reads too slowly
        or is gone: then whoever awaits a reply's `send` hears of it."""
        try:
            self.transport.write(data)
        except RuntimeError:  # uvloop's, of a transport that is closed
            return False
        return not self.flow.write_paused

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # asyncio's own habit
        super().connection_made(transport)
        seconds = self._settings.receive_timeout_s
        excess = len(self.connections) - self._settings.max_connections
        # Of open files the lowest free number is taken: beyond these there is no room for others.
        file = transport.get_extra_info("socket").fileno()
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if excess > self._settings.max_connections or 0 <= most - SPARE_FILES <= file:
            self._say_too_many(f"closed unread (file {file} of {most})")
            transport.abort()
        elif excess > 0:
            self._say_too_many("answered 503")
            self.app_state = {**self.app_state, TOO_MANY_CONNECTIONS: True}
            seconds = min(seconds, REFUSAL_S)
        self._limit_receiving(seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_receiving()
        self._stop_sending()
        self._unset_keepalive_if_required()
        for cycle in self._unanswered:
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None:
            return
        self._has_advanced = False
        self._unset_keepalive_if_required()
        try:
            self._parse(data)
        except httptools.HttpParserError as error:
            self._refuse_data(error)
        if self.transport.is_closing() or self._refusal is not None:
            return
        self._head_bytes = (
            0 if self._has_advanced or not self._has_begun else self._head_bytes + len(data)
        )
        if self._head_bytes > self._settings.max_header_bytes:
            self._refuse_size()
            return
        is_idle = self.cycle is None or self.cycle.response_complete
        if self._is_in_head and self._receiving is None and (self._has_begun or is_idle):
            self._limit_receiving(self._settings.receive_timeout_s)

    def _parse(self, data: bytes) -> None:
        """Feed the parser. It takes a message that offers an upgrade to end with its head; so
        another one reads the head again, without the offer, and then the body.

        Raises httptools.HttpParserError.
        """
        while True:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as offer:
                data = data[offer.args[0] :]
            else:
                return
            version = self.parser.get_http_version().encode()
            lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
            lines += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
            self.parser.feed_data(b"\r\n".join([*lines, b"", b""]))

    def on_message_begin(self) -> None:
        self._has_begun, self._head_bytes = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self._settings.max_header_bytes:
            raise _HeadTooLarge
        version = self.parser.get_http_version()
        is_in_chunks = check_head(self.parser.get_method(), version, self.headers)
        if not self.url.startswith(b"/"):
            self.url = path_of(self.url, self.headers)
        if len(self.pipeline) >= MAX_PIPELINED:
            raise ValueError(f"more than {MAX_PIPELINED} requests wait for the one before them")
        if self.parser.should_upgrade():
            return
        super().on_headers_complete()
        self._is_in_head, self._has_advanced = False, True
        self._stop_receiving()
        self._unanswered.append(self.cycle)
        self.headers = []  # for trailers: the request's own are complete
        if is_in_chunks:
            _report_faults(self)
        if version == "1.0":
            speak_1_0(self.cycle, self.parser.should_keep_alive())
        else:
            offer(self)
        if TOO_MANY_CONNECTIONS in self.app_state:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        self._has_advanced = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():  # see _parse
            return
        self._is_in_head, self._has_begun, self._has_advanced = True, False, True
        self._stop_receiving()
        if self.headers:  # trailers, among which llhttp heeds `Connection`
            self.cycle.keep_alive = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._unanswered.pop(0)
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if self._refusal is not None:
            self._send_refusal()
        elif self._has_begun:
            self._unset_keepalive_if_required()
            if not self._is_in_head and self.cycle.response_complete:  # its body is not here whole
                self._limit_receiving(LINGER_S)

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._abort_later()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_sending()

    def resume_writing(self) -> None:
        self._stop_sending()
        super().resume_writing()

    def _say_too_many(self, what: str) -> None:
        now = time.monotonic()
        if now - Connection._logged_at >= _SAY_AGAIN_S:
            Connection._logged_at = now
            log.warning(
                "there are %d connections, and max_connections = %d: more are %s",
                *(len(self.connections), self._settings.max_connections, what),
            )

    def _limit_receiving(self, seconds: float) -> None:
        self._stop_receiving()
        self._receiving = self.loop.call_later(seconds, self._receive_timed_out)

    def _receive_timed_out(self) -> None:
        self._receiving = None
        if self._is_in_head and self._has_begun:
            seconds = self._settings.receive_timeout_s
            message = f"the headers did not come within {seconds:g} s"
            self._refuse(HTTPStatus.REQUEST_TIMEOUT, "body_too_slow", message)
        else:
            self.transport.close()
            self._abort_later()

    def _watch_sending(self) -> None:
        self._unsent_bytes = self.transport.get_write_buffer_size()
        self._sending = self.loop.call_later(self._settings.send_timeout_s, self._check_sending)

    def _check_sending(self) -> None:
        if self.transport.get_write_buffer_size() < self._unsent_bytes:
            self._watch_sending()
        else:
            self.transport.abort()

    def _abort_later(self) -> None:
        """Abort a closed connection if its last bytes are not taken in time."""
        self.loop.call_later(self._settings.send_timeout_s, self.transport.abort)

    def _stop_receiving(self) -> None:
        if self._receiving is not None:
            self._receiving.cancel()
            self._receiving = None

    def _stop_sending(self) -> None:
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None

    def _refuse_data(self, error: httptools.HttpParserError) -> None:
        """Refuse what the parser has refused, or a callback of it, whose error is the context."""
        cause = error.__context__ or error
        if isinstance(cause, _HeadTooLarge):
            self._refuse_size()
            return
        reason = str(cause)[:200]  # a URL may be long
        if self._has_begun and self.parser.get_method() == b"PRI":
            reason = "this server does not speak HTTP/2"
        self.logger.warning("Invalid HTTP request received: %s", reason)
        message = f"this is not HTTP/1.1: {reason}"
        if self._is_in_head:
            self._refuse(HTTPStatus.BAD_REQUEST, "invalid_http", message)
        else:
            self._break_body(message)

    def _refuse_size(self) -> None:
        limit = self._settings.max_header_bytes
        if not self._is_in_head:
            self._break_body(f"a chunk's extensions or the trailers are larger than {limit} bytes")
            return
        message = f"the request line and headers are larger than {limit} bytes"
        status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
        self._refuse(status, "headers_too_large", message)

    def _break_body(self, reason: str) -> None:
        """Tell whoever reads the newest request's body that the rest will not come."""
        self._refusal, self.body_fault = b"", reason
        self.cycle.keep_alive = False
        self.cycle.message_event.set()
        if self.cycle.response_complete:
            self.transport.close()

    def _refuse(self, status: HTTPStatus, code: str, message: str) -> None:
        """Answer with an error, before the routes have seen the request, and close."""
        detail = ErrorDetail(message, "invalid_request_error", None, code)
        body = msgspec.json.encode(ErrorBody(detail))
        lines = [
            STATUS_LINE[status].rstrip(),
            *(b"%b: %b" % header for header in self.server_state.default_headers),
            b"content-type: application/json",
            b"content-length: %d" % len(body),
            b"x-request-id: %b" % uuid.uuid4().hex.encode(),
            b"connection: close",
        ]
        if status != HTTPStatus.REQUEST_TIMEOUT:
            lines.append(b"x-should-retry: false")
        self._refusal = b"\r\n".join([*lines, b"", body])
        self._stop_receiving()
        self._send_refusal()

    def _send_refusal(self) -> None:
        if not self._unanswered and self._refusal is not None:
            self.transport.write(self._refusal)
            self.transport.close()
            self._abort_later()


def _report_faults(connection: Connection) -> None:
    """Have whoever reads the newest request's body get a fault, as InvalidRequest."""
    cycle = connection.cycle
    receive = cycle.receive

    async def receive_or_raise() -> ASGIReceiveEvent:
        message = await receive()
        if connection.body_fault and connection.cycle is cycle:
            raise InvalidRequest(connection.body_fault)
        return message

    cycle.receive = receive_or_raise  # type: ignore[method-assign]  # for this request alone


def offer(connection: Connection) -> None:
    """Have the reply to the newest request know the extension CONNECT."""
    cycle = connection.cycle

    def connect(outlet: Any) -> None:
        if cycle.chunked_encoding and not cycle.disconnected:
            outlet.connection = connection

    cycle.scope["extensions"] = {CONNECT: connect}  # type: ignore[dict-item]  # uvicorn's own type


def speak_1_0(cycle: RequestResponseCycle, asks_to_stay: bool) -> None:
    """Answer as HTTP/1.0, which has no chunks: a reply without a length ends with the connection. A
    client that asks for the connection to stay is told that it does."""
    cycle.keep_alive = asks_to_stay
    send, is_framed = cycle.send, True

    async def send_1_0(message: Message) -> None:
        nonlocal is_framed
        if message["type"] == "http.response.start":
            headers = list(message["headers"])
            is_framed = any(name.lower() == b"content-length" for name, _ in headers)
            if not is_framed:
                cycle.keep_alive = cycle.chunked_encoding = False
            elif cycle.keep_alive:
                headers.append((b"connection", b"keep-alive"))
            message = {**message, "headers": headers}
        elif not is_framed:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)  # type: ignore[arg-type]  # uvicorn has types of its own

    cycle.send = send_1_0  # type: ignore[assignment]  # for this request alone
