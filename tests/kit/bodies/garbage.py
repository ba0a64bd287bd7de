"""Bodies and whole requests that no client of ours would send, drawn from a seeded generator."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 3, 1.5, -0.0, 1e-320, 1e308, 2**31, 2**63, -(2**63) - 1, 2**64),
    *(10**400, "", " ", "the cat", "\0", "\ud800", "\U0010ffff" * 300, "x" * 5_000, "1", "null"),
    *([], {}, [[]], [None], [""], [1, "a"], [[1], "a"], [[1], []], [-1], [2**31], [1.5], [True]),
    *({"a": 1}, {"": []}, [{}], [[[1]]], list(range(200)), [["the cat"]], {"prompt": "x"}),
)
HUGE = ("1e999", "-1e999", "9" * 400, "-" + "9" * 5_000, "0." + "1" * 5_000, "1e-999999", "NaN")
"""Numbers as text: the encoder would not write them."""

Draw = Callable[[random.Random, dict[str, Any], list[str]], bytes]


def _encoded(body: Any) -> bytes:
    return json.dumps(body).encode()


def raw(rng: random.Random, valid: dict[str, Any], names: list[str]) -> bytes:
    return rng.randbytes(rng.choice((0, 1, 2, 10, 100, 3_000)))


def truncated(rng: random.Random, valid: dict[str, Any], names: list[str]) -> bytes:
    body = _encoded(valid)
    return body[: rng.randrange(len(body))]


def damaged(rng: random.Random, valid: dict[str, Any], names: list[str]) -> bytes:
    """Some bytes replaced, so that it may not be UTF-8 either."""
    body = bytearray(_encoded(valid))
    for _ in range(rng.randint(1, 4)):
        body[rng.randrange(len(body))] = rng.randrange(256)
    return bytes(body)


def wrong_types(rng: random.Random, valid: dict[str, Any], names: list[str]) -> bytes:
    chosen = rng.sample(names, rng.randint(1, min(3, len(names))))
    return _encoded(valid | {name: rng.choice(VALUES) for name in chosen})


def no_object(rng: random.Random, valid: dict[str, Any], names: list[str]) -> bytes:
    return _encoded(rng.choice(VALUES))


def nested(rng: random.Random, valid: dict[str, Any], names: list[str]) -> bytes:
    """Lists or objects in each other, around the depth at which parsers give up and far beyond."""
    depth = rng.choice((rng.randrange(30), rng.randrange(900, 1_010), rng.randrange(20_000)))
    opening, closing = rng.choice(((b"[", b"]"), (b'{"a":', b"}"), (b'[{"":', b"}]")))
    value = opening * depth + b"1" + closing * depth
    if rng.random() < 0.2:
        return value
    return _with(valid, rng.choice(names), value)


def huge_numbers(rng: random.Random, valid: dict[str, Any], names: list[str]) -> bytes:
    value = rng.choice(HUGE).encode()
    return _with(valid, rng.choice(names), rng.choice((value, b"[%b]" % value, b"[[%b]]" % value)))


def not_utf8(rng: random.Random, valid: dict[str, Any], names: list[str]) -> bytes:
    bad = rng.choice((b"\xff", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xe2\x82"))
    escaped = rng.choice((bad, b"\\ud800", b"\\udc00\\ud800", b"\\u0000", b"\\u12"))
    return _with(valid, rng.choice(names), b'"a' + escaped + b'b"')


def twice(rng: random.Random, valid: dict[str, Any], names: list[str]) -> bytes:
    """One field given twice."""
    name = rng.choice(names)
    return _with(valid, name, _encoded(rng.choice(VALUES)), key=name)


def _with(valid: dict[str, Any], name: str, value: bytes, key: str = "") -> bytes:
    """The valid body, with a field in front whose value is given as JSON."""
    rest = _encoded({other: item for other, item in valid.items() if other != name or key})
    return b'{"%b": %b, %b' % (name.encode(), value, rest[1:])


BODIES: tuple[Draw, ...] = (
    raw,
    truncated,
    damaged,
    wrong_types,
    no_object,
    nested,
    huge_numbers,
    not_utf8,
    twice,
)


def requests(rng: random.Random, path: str, body: bytes) -> bytes:
    """What is sent over a connection instead of a request."""
    line = f"POST {path} HTTP/1.1\r\n".encode()
    length = b"Content-Length: %d\r\n" % len(body)
    host = b"Host: localhost\r\n"
    whole = line + host + length + b"\r\n" + body
    chunked = line + host + b"Transfer-Encoding: chunked\r\n\r\n"
    return rng.choice(
        (
            rng.randbytes(rng.randrange(200)),
            b"\r\n" * rng.randrange(50),
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(200),  # TLS
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + rng.randbytes(30),
            b"GET /\xff\xfe%zz?\xff HTTP/1.1\r\nHost: localhost\r\n\r\n",
            b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
            b"GET /health HTTP/9.9\r\n\r\n",
            b"GET /health\r\n\r\n",
            b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
            b"GET /v1/models/%00%2e%2e%2f%ff HTTP/1.1\r\nHost: localhost\r\n\r\n",
            whole[: rng.randrange(len(whole))],
            whole.replace(length, b"Content-Length: -1\r\n"),
            whole.replace(length, b"Content-Length: 99999999999999999999\r\n"),
            whole.replace(length, length + b"Content-Length: 3\r\n"),
            whole.replace(length, length + b"Transfer-Encoding: chunked\r\n"),
            whole.replace(host, b"Host srm\r\n"),
            whole.replace(host, host + b"X-Request-Id: \xff\xfe\x01\r\n"),
            whole.replace(host, host + b"Traceparent: \xe2\x82\r\n"),
            whole.replace(host, host + b"A: " + b"b" * 200_000 + b"\r\n"),
            whole.replace(host, b"".join(b"H%d: v\r\n" % i for i in range(500))),
            chunked + b"ffffffffffffffff\r\n" + body,
            chunked + b"-5\r\nabc\r\n0\r\n\r\n",
            chunked + b"zz\r\n" + rng.randbytes(20),
            chunked + b"3\r\nabcdef\r\n0\r\n\r\n",
            chunked + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) + rng.randbytes(20),
            whole.replace(b"HTTP/1.1\r\n", b"HTTP/1.1\r\nExpect: 100-continue\r\n"),
            whole.replace(b"HTTP/1.1\r\n", b"HTTP/1.1\r\nUpgrade: websocket\r\n"),
            whole.replace(b"HTTP/1.1\r\n", b"HTTP/1.1\r\nContent-Encoding: gzip\r\n"),
            whole * 3,
        )
    )
