"""What a socket can do to the server that a well-behaved client would not."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from email.message import Message
from http.client import HTTPException, HTTPResponse
from pathlib import Path

import pytest

from tests.kit.serving import MAX_BODY_BYTES, SERVER_FLAGS, Server, children, connect, wait_until

MAX_HEADER_BYTES = 4_096
MAX_CONNECTIONS = 40
END = b" HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture(scope="module")
def edge(text_model: Path) -> Iterator[Server]:
    """A server without patience."""
    flags = (
        *SERVER_FLAGS,
        "--receive-timeout-s=0.5",
        "--send-timeout-s=0.5",
        f"--max-header-bytes={MAX_HEADER_BYTES}",
        f"--max-connections={MAX_CONNECTIONS}",
    )
    with Server(text_model, *flags) as running:
        yield running


class Raw(ExitStack):
    """A connection, in bytes."""

    def __init__(self, server: Server) -> None:
        super().__init__()
        host, port = server.url.removeprefix("http://").rsplit(":", 1)
        self._socket = self.enter_context(socket.create_connection((host, int(port)), timeout=120))

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def reply(self) -> tuple[int, Message, bytes]:
        """The next one: status, headers, body."""
        response = HTTPResponse(self._socket)
        response.begin()
        return response.status, response.headers, response.read()

    def rest(self) -> bytes:
        """All until it is closed."""
        data = b""
        try:
            while more := self._socket.recv(65_536):
                data += more
        except ConnectionResetError:
            pass
        return data


def check_error(raw: Raw, status: int, code: str) -> None:
    """The next reply has our shape, an id, and says whether a retry makes sense."""
    result, headers, body = raw.reply()
    assert result == status, body
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert re.fullmatch(r"[0-9a-f]{32}", headers["x-request-id"])
    assert headers.get("x-should-retry") == "false"


@pytest.mark.parametrize(
    ("status", "code", "sent"),
    [
        (400, "invalid_http", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc"),
        (400, "invalid_http", b"GET /\xff" + END),
        (400, "invalid_http", b"BREW /" + END),
        (400, "invalid_http", POST + b"Content-Length: -1\r\n\r\n"),
        (400, "invalid_http", POST + b"Content-Length: 99999999999999999999999\r\n\r\n"),
        (431, "headers_too_large", POST + b"X-Long: " + b"x" * 2 * MAX_HEADER_BYTES),
        (431, "headers_too_large", POST + b"X: y\r\n" * MAX_HEADER_BYTES + b"\r\n"),
        (431, "headers_too_large", b"GET /" + b"x" * 2 * MAX_HEADER_BYTES + END),
        (413, "body_too_large", POST + b"Content-Length: %d\r\n\r\n" % (MAX_BODY_BYTES + 1)),
        (400, "invalid_request", POST + b"Content-Length: 0\r\n\r\n"),
        (400, "invalid_request",
         POST + b"Content-Length: 2\r\nContent-Encoding: gzip\r\n\r\n{}"),
        (400, "invalid_request",
         POST + b"Transfer-Encoding: chunked\r\n\r\n5\r\n\xff\xfe\xfd\xfc\xfb\r\n0\r\n\r\n"),
        (404, "not_found", b"GET /nowhere" + END),
        (405, "method_not_allowed", b"PUT /v1/completions" + END),
        (405, "method_not_allowed", b"OPTIONS /v1/completions" + END),
        (405, "method_not_allowed", b"GET /v1/completions" + END),
    ],
)  # fmt: skip
def test_every_error_has_one_shape(edge: Server, status: int, code: str, sent: bytes) -> None:
    with Raw(edge) as raw:
        raw.send(sent)
        check_error(raw, status, code)


def test_a_slash_at_the_end_is_none(server: Server) -> None:
    assert server.get("/health/").json() == server.get("/health").json()
    assert server.http.post("/v1/completions/", json={"prompt": "a"}).status_code == 200
    assert server.get("/v1/models//").json() == server.get("/v1/models").json()
    for path, status in (("/health", 200), ("/v1/models", 200), ("/nowhere", 404)):
        reply = server.http.head(path)
        assert (reply.status_code, reply.content) == (status, b"")
        assert reply.headers["x-request-id"]


@pytest.mark.parametrize(
    ("sent", "is_kept"), [("abc-1.2_3:4", True), ("a b", False), ("x" * 129, False), ("", False)]
)
def test_a_sane_request_id_is_kept(server: Server, sent: str, is_kept: bool) -> None:
    reply = server.http.get("/health", headers={"x-request-id": sent})
    assert (reply.headers["x-request-id"] == sent) == is_kept


@pytest.mark.slow
def test_an_idle_connection_is_kept_longer_than_clients_keep_it(server: Server) -> None:
    """Or a request may cross with our closing of it; aiohttp keeps one for 15 s, httpx for 5 s."""
    with Raw(server) as raw:
        for pause_s in (0, 16):
            time.sleep(pause_s)
            raw.send(b"GET /health" + END)
            assert raw.reply()[0] == 200


def test_what_does_not_come_ends_the_connection(edge: Server) -> None:
    with ExitStack() as opened:
        waiting = []
        for sent, message in (
            (b"GET /health HT", b"HTTP/1.1 408 "),
            (POST + b"Content-Length: 100\r\n\r\n{", b"body_too_slow"),
            (b"", b""),
            (b"\r\n", b""),
        ):
            raw = opened.enter_context(Raw(edge))
            raw.send(sent)
            waiting.append((raw, message))
        for raw, message in waiting:
            rest = raw.rest()
            assert message in rest and bool(message) == bool(rest)


def test_headers_that_come_a_byte_at_a_time_end_the_connection(edge: Server) -> None:
    with Raw(edge) as raw, pytest.raises(OSError):  # which of the sends is chance
        for byte in POST * 100:
            raw.send(bytes([byte]))
            time.sleep(0.02)


def test_the_rest_of_a_refused_body_is_not_read_for_ever(edge: Server) -> None:
    with Raw(edge) as raw:
        raw.send(POST + b"Content-Length: %d\r\n\r\n" % (MAX_BODY_BYTES + 1))
        check_error(raw, 413, "body_too_large")
        with pytest.raises(OSError):  # which of the sends is chance
            for _ in range(200):
                raw.send(b"x")
                time.sleep(0.05)


def test_a_reply_that_nobody_takes_ends_the_request(edge: Server) -> None:
    # Each choice begins with the scores of its prompt: some 20 MB, more than is ever underway.
    large = {"prompt": [5] * 100, "n": 300, "max_tokens": 20, "echo": True, "logprobs": 20}
    gone = edge.metric("http_requests_total", "499")
    with connect(edge, **large):
        wait_until(lambda: edge.metric("http_requests_total", "499") > gone, within_s=600)
        edge.wait_until_idle()


def test_http_1_0_keeps_a_connection_that_asks_for_it(edge: Server) -> None:
    """As `ab -k` does. A stream it gets without chunks: their lengths would be part of the text."""
    get = b"GET /health HTTP/1.0\r\n%b\r\n"
    body = b'{"prompt": "the cat", "max_tokens": 2, "stream": true}'
    with Raw(edge) as raw:
        for _ in range(3):
            raw.send(get % b"Connection: Keep-Alive\r\n")
            status, headers, content = raw.reply()
            assert (status, headers["connection"]) == (200, "keep-alive")
            assert content == b'{"status":"ok"}'
        raw.send(
            b"POST /v1/completions HTTP/1.0\r\nConnection: keep-alive\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        head, _, events = raw.rest().partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head and b"\r\nconnection: close" in head
    *lines, done, end = events.split(b"\n\n")
    assert lines and all(line.startswith(b"data: {") for line in lines)
    assert (done, end) == (b"data: [DONE]", b"")
    with Raw(edge) as raw:
        raw.send(get % b"")
        assert b"\r\nconnection: close\r\n" in raw.rest()


def test_too_many_pipelined_requests_end_the_connection(edge: Server) -> None:
    with Raw(edge) as raw:
        raw.send((b"GET /v1/models" + END) * 2_000)
        assert raw.rest().count(b"HTTP/1.1 200") <= 20
    assert edge.get("/health").status_code == 200


def test_answers_probes_beyond_max_connections(edge: Server) -> None:
    with ExitStack() as opened:
        for _ in range(MAX_CONNECTIONS + 2):
            opened.enter_context(Raw(edge)).send(b"GET /v1/m" + END)
        last = opened.enter_context(Raw(edge))
        last.send(b"GET /v1/models" + END)
        status, headers, body = last.reply()
        assert status == 503, body
        assert int(headers["retry-after"]) >= 1
        assert headers["connection"] == "close"
        probe = opened.enter_context(Raw(edge))
        probe.send(b"GET /health" + END)
        assert probe.reply()[0] == 200
    assert edge.get("/v1/models").status_code == 200


def test_answers_503_beyond_the_open_files(text_model: Path) -> None:
    """Nobody was answered for as long as others idled, and no line said why."""
    with Server(
        text_model, *SERVER_FLAGS, "--api-processes=1", "--receive-timeout-s=1000"
    ) as server:
        # Its successor has this limit too.
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (64, 64))
        os.kill(children(server)["api"], signal.SIGKILL)
        wait_until(lambda: "max_connections = 16384 is lowered to 8" in "".join(server.lines))
        with ExitStack() as idle:
            for _ in range(200):
                idle.enter_context(Raw(server))
            wait_until(lambda: _status(server) == 503)
        wait_until(lambda: _status(server) == 200)
        lines = [line for line in server.lines if "max_connections = 8" in line]
        assert len(lines) == 1 and re.search(r"there are \d+ connections", lines[0]), lines


def _status(server: Server) -> int:
    """0 if the connection is closed unread."""
    try:
        with Raw(server) as client:
            client.send(b"GET /v1/models" + END)
            return client.reply()[0]
    except (ConnectionError, HTTPException):
        return 0
