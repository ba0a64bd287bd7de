from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from srm.loadtest.client.connection import ClientConnection
from tests.kit.loads.raw_server import END, HEAD, chunk, make_reply


class Pipe(asyncio.Transport):
    """Where a connection writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.aborted = False

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def abort(self) -> None:
        self.aborted = True


class End(NamedTuple):
    kind: str
    status: int
    is_reusable: bool


class Reported:
    """What a connection says of one reply."""

    def __init__(self) -> None:
        self.data = b""
        self.ends: list[End] = []

    def body(self, connection: ClientConnection, data: bytes, now: float) -> None:
        self.data += data

    def end_reply(self, connection: ClientConnection, now: float) -> None:
        self.ends.append(End("whole", connection.status, connection.is_reusable))

    def broken(self, connection: ClientConnection, kind: str, message: str, now: float) -> None:
        self.ends.append(End(kind, connection.status, connection.is_reusable))

    @property
    def end(self) -> End:
        (end,) = self.ends
        return end


def read_reply(
    *parts: bytes, closed: bool | Exception = False
) -> tuple[Reported, Pipe, ClientConnection]:
    connection, pipe, reported = ClientConnection(lambda _: None), Pipe(), Reported()
    connection.connection_made(pipe)
    connection.send(b"request", reported)
    for part in parts:
        if not pipe.aborted:
            connection.data_received(part)
    if closed or pipe.aborted:
        connection.connection_lost(closed if isinstance(closed, Exception) else None)
    return reported, pipe, connection


Case = tuple[bytes, bytes, int]
"""A reply, its body and its status."""
REPLIES = st.one_of(
    st.tuples(st.binary(max_size=60), st.sampled_from([200, 404, 503])).map(
        lambda it: (make_reply(*it), *it)
    ),
    st.lists(st.binary(min_size=1, max_size=20), max_size=5).map(
        lambda parts: (HEAD + b"".join(map(chunk, parts)) + END, b"".join(parts), 200)
    ),
)
EARLY = b"HTTP/1.1 100 Continue\r\n\r\n"
HINTS = st.sampled_from([b"", EARLY, b"HTTP/1.1 103 Early\r\nx: y\r\n\r\n"])


@given(HINTS, REPLIES, st.integers(1, 30))
def test_replies_are_the_same_however_they_are_split(early: bytes, reply: Case, size: int) -> None:
    data = early + reply[0]
    parts = (data[place : place + size] for place in range(0, len(data), size))
    reported, pipe, connection = read_reply(*parts)
    assert (reported.data, reported.end) == (reply[1], End("whole", reply[2], True))
    assert not pipe.aborted
    second = Reported()
    connection.send(b"another", second)
    connection.data_received(make_reply(b"more"))
    assert (second.data, second.end.kind) == (b"more", "whole")
    assert pipe.written == b"requestanother"


@given(REPLIES, st.integers(0, 200))
def test_a_reply_that_is_cut_short_is_never_whole(reply: Case, cut: int) -> None:
    data = reply[0][: min(cut, len(reply[0]) - 1)]
    end = read_reply(*([data] if data else []), closed=True)[0].end
    assert (end.kind, end.is_reusable) == ("disconnected", False)


def test_a_body_without_a_length_ends_with_the_connection() -> None:
    head = b"HTTP/1.1 200 OK\r\n\r\n"
    reported, _, _ = read_reply(head, b"all", b" of it", closed=True)
    assert (reported.data, reported.end) == (b"all of it", End("whole", 200, False))
    reported, _, _ = read_reply(head, b"all", closed=ConnectionResetError())
    assert reported.end.kind == "disconnected"


def test_an_early_hint_is_no_reply() -> None:
    assert read_reply(EARLY, closed=True)[0].end == End("disconnected", -1, False)


@pytest.mark.parametrize(
    "data",
    [
        b"220 smtp.example ESMTP\r\n",
        b"\x16\x03\x01\x02\x00\x01",
        HEAD + b"no number\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n",
    ],
)
def test_what_is_no_http(data: bytes) -> None:
    reported, pipe, _ = read_reply(data)
    assert reported.end.kind == "protocol" and pipe.aborted


@pytest.mark.parametrize(
    "reply",
    [
        make_reply(b"a", 200, "connection: close"),
        make_reply(b"a").replace(b"1.1", b"1.0"),
        make_reply(b"a") + make_reply(b"that nobody asked for"),
        make_reply(b"a") + b"rubbish",
    ],
)
def test_a_connection_that_cannot_be_used_again(reply: bytes) -> None:
    reported, _, _ = read_reply(reply)
    assert (reported.data, reported.end) == (b"a", End("whole", 200, False))


def test_what_comes_unasked_closes_an_idle_connection() -> None:
    reported, pipe, connection = read_reply(make_reply(b"a"))
    connection.data_received(make_reply(b"", 408))
    assert pipe.aborted and not connection.is_reusable
    assert reported.end.kind == "whole"


@pytest.mark.parametrize(
    "parts",
    [
        [b"HTTP/1.1 100 Continue\r\n\r\n" * 100],
        [b"HTTP/1.1 200 OK\r\n", b"a: " + b"x" * 1_000 + b"\r\n"],
        [b"HTTP/1.1 200 OK\r\na: ", b"x" * 1_000],
    ],
    ids=["statuses", "headers", "a header"],
)
def test_a_head_without_end_is_no_reply(parts: list[bytes]) -> None:
    begin, more = parts[0], parts[-1]
    reported, pipe, _ = read_reply(begin, *[more] * 2_000)
    assert reported.end.kind == "protocol" and pipe.aborted
