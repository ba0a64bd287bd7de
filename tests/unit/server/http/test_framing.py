"""Where one request ends and the next begins: as RFC 9112 says, whatever else a head says and
however the bytes are cut. h11 is the second opinion."""

from __future__ import annotations

import random
from itertools import product

import pytest

from srm.server.http.connection import Connection
from tests.unit.server.http.wire import Seen, requests_by_h11, send_pieces

SMUGGLED = b"GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n"
NEXT = b"GET /next?a=b HTTP/1.1\r\nHost: localhost\r\n\r\n"
HEAD = b"POST /first HTTP/1.1\r\nHost: localhost\r\n"
FRAMED = {
    "length": b"Content-Length: %d\r\n\r\n%b" % (len(SMUGGLED), SMUGGLED),
    "chunks": b"Transfer-Encoding: chunked\r\n\r\n5;a=b\r\n%b\r\n%x\r\n%b\r\n0\r\n\r\n"
    % (SMUGGLED[:5], len(SMUGGLED) - 5, SMUGGLED[5:]),
    "nothing": b"\r\n",
}
OFFERS = {
    "java": b"Connection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n"
    b"Upgrade: h2c\r\n",
    "websocket": b"Upgrade: websocket\r\nConnection: upgrade\r\nSec-WebSocket-Key: abc\r\n",
    "two": b"Upgrade: h2c\r\nconnection: keep-alive, UPGRADE\r\nupgrade: TLS/1.0, a/b\r\n",
    "awaiting": b"Expect: 100-continue\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n",
    "none": b"",
}

DAMAGES = [b"\r", b"\n", b" ", b"\t", b":", b"0", b",", b"\x00"]


def body_of(kind: str) -> bytes:
    return b"" if kind == "nothing" else SMUGGLED


async def check_every_split(data: bytes) -> None:
    whole = await send_pieces([data])
    for at in range(1, len(data)):
        assert await send_pieces([data[:at], data[at:]]) == whole, data[:at]
    assert await send_pieces([data[at : at + 1] for at in range(len(data))]) == whole


@pytest.mark.parametrize(("offer", "kind"), list(product(OFFERS, FRAMED)))
async def test_an_offered_upgrade_leaves_the_body_to_its_request(offer: str, kind: str) -> None:
    """llhttp ends such a message with its head: the body was lost, or the next request."""
    once = HEAD + OFFERS[offer] + FRAMED[kind]
    data = once + once + NEXT
    result = await send_pieces([data])
    first = Seen("POST", "/first", body_of(kind))
    assert result.seen == [first, first, Seen("GET", "/next?a=b", b"")] == requests_by_h11(data)
    assert [status for status, _ in result.replies] == [200] * 3 and not result.is_closed
    await check_every_split(once + NEXT)


async def test_an_offer_with_close_is_the_last_request() -> None:
    data = HEAD + b"Connection: close, Upgrade\r\nUpgrade: h2c\r\n" + FRAMED["length"] + NEXT
    result = await send_pieces([data])
    assert result.seen == [Seen("POST", "/first", SMUGGLED)] and result.is_closed
    await check_every_split(data)


GOOD = FRAMED["length"]
CHUNKED = b"Transfer-Encoding: chunked\r\n"
REFUSED = (
    b"POST / HTTP/1.1\r\n" + GOOD,
    HEAD + b"Host: localhost\r\n" + GOOD,
    HEAD + b"hOST: evil\r\n" + GOOD,
    *(b"POST / HTTP/1.1\r\nHost: %b\r\n%b" % (host, GOOD)
      for host in (b"a b", b"a,b", b"a/b", b"u@a", b"a?b", b"a:b", b"[::1", b"\xe4", b"a#",
                   b"a\\b")),
    *(HEAD + coding + FRAMED["chunks"].removeprefix(CHUNKED) for coding in (
        b"Transfer-Encoding: gzip, chunked\r\n",
        b"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: gzip\r\n",
        b"Transfer-Encoding: chunked, chunked\r\n",
        b"Transfer-Encoding: chunked, identity\r\n",
        b"Transfer-Encoding: chunked;a=b\r\n",
        b"Transfer-Encoding: identity\r\n",
        b"Transfer-Encoding: xchunked\r\n",
        b"Transfer-Encoding: , chunked\r\n",
        b"Transfer-Encoding:\r\n",
        b"Transfer-Encoding : chunked\r\n",
        b"Transfer-Encoding\t: chunked\r\n",
        b"Transfer-Encoding:\r\n chunked\r\n",
        CHUNKED + CHUNKED,
        CHUNKED + b"Content-Length: 3\r\n",
        b"Content-Length: 3\r\n" + CHUNKED,
        b"Upgrade: h2c\r\nConnection: Upgrade\r\nTransfer-Encoding: gzip, chunked\r\n",
    )),
    *(HEAD + length + b"\r\n" + SMUGGLED for length in (
        b"Content-Length: 3\r\nContent-Length: 36\r\n",
        b"Content-Length: 36\r\nContent-Length: 36\r\n",
        b"Content-Length: 36, 36\r\n",
        b"Content-Length: +36\r\n",
        b"Content-Length: 1e9\r\n",
        b"Content-Length: 0x24\r\n",
        b"Content-Length: 3 6\r\n",
        b"Content-Length: \r\n",
        b"Content-Length : 36\r\n",
        b"Upgrade: h2c\r\nConnection: Upgrade\r\nContent-Length: 3\r\nContent-Length: 36\r\n",
    )),
    *(HEAD + line + GOOD for line in (
        b"X: a\r\n b\r\n", b" X: a\r\n", b"X: a\n", b"X: a\rY: b\r\n", b"X: a\x00b\r\n",
        b"X : a\r\n", b"X\r\n", b": a\r\n", b"X: a\r\n\tb\r\n",
    )),
    b"POST / HTTP/1.0\r\n" + CHUNKED + b"\r\n0\r\n\r\n",
    b"GET / HTTP/1.1\nHost: a\n\n",
    *(b"GET / HTTP/%b\r\nHost: a\r\n\r\n" % version
      for version in (b"2.0", b"0.9", b"1.2", b"1.10", b"3.7")),
    b"GET /\r\n\r\n",
    b"CONNECT /v1/models HTTP/1.1\r\nHost: a\r\n\r\n",
    b"CONNECT a:80 HTTP/1.1\r\nHost: a:80\r\n\r\n",
    b"GET http://evil/ HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET http://u@localhost/ HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET http://localhost/ HTTP/1.0\r\n\r\n",
)  # fmt: skip


@pytest.mark.parametrize("data", REFUSED)
async def test_refuses_a_head_that_others_read_otherwise(data: bytes) -> None:
    result = await send_pieces([data + NEXT])
    assert not result.seen and result.is_closed
    ((status, body),) = result.replies
    assert (status, body["error"]["code"]) == (400, "invalid_http")
    await check_every_split(data + NEXT)


BAD_CHUNKS = (
    *(b"zz\r\nabc\r\n", b"-3\r\nabc\r\n", b"0x3\r\nabc\r\n", b"3\nabc\r\n", b"3 \r\nabc\r\n"),
    *(b"ffffffffffffffffff\r\nabc", b"3\r\nabcd\r\n", b"3\r\nabc0\r\n", b"3;\nabc\r\n", b"\r\n"),
    *(b"2\r\nab\r\n\xff\r\n", b"0\r\nX\r\n\r\n", b"0\r\nContent-Length: 5\r\n\r\n"),
)


@pytest.mark.parametrize("offer", [OFFERS["none"], OFFERS["java"]])
@pytest.mark.parametrize("chunks", BAD_CHUNKS)
async def test_a_bad_chunk_is_answered(chunks: bytes, offer: bytes) -> None:
    """The connection was closed without a word."""
    data = HEAD + offer + CHUNKED + b"\r\n" + chunks + NEXT
    result = await send_pieces([data])
    assert not result.seen and result.is_closed
    ((status, body),) = result.replies
    assert status == 400 and "not HTTP/1.1" in body["error"]["message"]
    await check_every_split(data)


@pytest.mark.parametrize("is_held", [False, True])
@pytest.mark.parametrize(
    ("bad", "status"),
    [
        (REFUSED[0], 400),
        (HEAD + CHUNKED + b"\r\nzz\r\n", 400),
        (HEAD + b"X: " + b"a" * 90_000, 431),
        (HEAD + b"X: " + b"a" * 90_000 + b"\r\n\r\n", 431),
    ],
)
async def test_answers_first_what_came_first(bad: bytes, status: int, is_held: bool) -> None:
    """The refusal stood in the middle of the reply before it, or that reply never came."""
    result = await send_pieces([HEAD + GOOD, bad, NEXT], is_held)
    assert [text.target for text in result.seen] == ["/first"] and result.is_closed
    assert [item for item, _ in result.replies] == [200, status]


async def test_says_that_it_speaks_no_http_2() -> None:
    result = await send_pieces([b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00" * 2])
    ((status, body),) = result.replies
    assert status == 400 and result.is_closed and "HTTP/2" in body["error"]["message"]


async def test_trailers_are_no_headers() -> None:
    """They came into the request's headers, behind the back of whoever had checked those."""
    trailers = b"Host: evil\r\nAuthorization: Bearer x\r\nX-Request-Id: t\r\nConnection: close\r\n"
    data = HEAD + CHUNKED + b"\r\n2\r\n{}\r\n0\r\n" + trailers + b"\r\n"
    result = await send_pieces([data])
    assert result.seen == [Seen("POST", "/first", b"{}")]
    assert result.headers == [{"host": "localhost", "transfer-encoding": "chunked"}]
    assert result.is_closed  # the parser has taken the trailer's word, and reads nothing more
    await check_every_split(data)


@pytest.mark.parametrize("endless", [b"3;" + b"a" * 99_000, b"0\r\n" + b"X: a\r\n" * 20_000])
async def test_extensions_and_trailers_are_bounded_as_headers_are(endless: bytes) -> None:
    data = HEAD + CHUNKED + b"\r\n" + endless
    result = await send_pieces([data[at : at + 1_000] for at in range(0, len(data), 1_000)])
    assert not result.seen and result.is_closed
    assert [status for status, _ in result.replies] == [400]


async def test_a_target_with_its_host_is_the_path_of_that_host() -> None:
    for target, seen in ((b"http://LocalHost/a?b", "/a?b"), (b"HTTP://localhost", "/")):
        result = await send_pieces([b"GET %b HTTP/1.1\r\nHost: localhost\r\n\r\n" % target])
        assert [text.target for text in result.seen] == [seen]


async def test_any_row_of_requests_is_what_h11_finds_however_it_is_cut() -> None:
    rng = random.Random(1)
    for _ in range(300):
        parts = [
            HEAD + OFFERS[rng.choice(list(OFFERS))] + FRAMED[rng.choice(list(FRAMED))]
            for _ in range(rng.randint(1, 4))
        ]
        data = b"".join(parts)
        cuts = sorted(rng.choices(range(len(data)), k=rng.randint(0, 5)))
        pieces = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
        assert (await send_pieces(pieces)).seen == requests_by_h11(data)


async def test_a_damaged_request_is_refused_or_what_h11_finds() -> None:
    """Behind the request line, in which we allow more spaces, and before the last empty line, of
    which we allow more."""
    rng = random.Random(2)
    for _ in range(2_000):
        kind = rng.choice(list(FRAMED))
        data = bytearray(HEAD + OFFERS[rng.choice(list(OFFERS))] + FRAMED[kind])
        end = len(data) - 2 if kind == "chunks" else data.index(b"\r\n\r\n")
        at = rng.randrange(HEAD.index(b"\r\n"), end)
        data[at : at + rng.randint(0, 2)] = rng.choice([b"", *DAMAGES])
        seen = (await send_pieces([bytes(data + NEXT)])).seen
        there = requests_by_h11(bytes(data + NEXT))
        assert seen == there[: len(seen)], bytes(data)


async def test_a_bug_in_a_timer_leaves_the_connection(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    limit, pieces = Connection._limit_receiving, [NEXT[:20], NEXT[20:]]

    def fail(_connection: Connection) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(Connection, "_limit_receiving", lambda self, _seconds: limit(self, 0.0))
    refused = await send_pieces(pieces)
    assert [status for status, _ in refused.replies] == [408] and refused.is_closed
    monkeypatch.setattr(Connection, "_receive_timed_out", fail)
    result = await send_pieces(pieces)
    assert [status for status, _ in result.replies] == [200] and not result.is_closed
    assert "KeyError: 'a bug'" in caplog.text
