"""A server that others send lines of batches to, and that lies: each lie by its name.

Whatever it says of itself or answers, a batch's owner loses nothing but the time of a line. One
lie is told at a time; until then and beside it the server is as it should be.
"""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

KIB = b"x" * 1024
_ALIVE = b"data: {}\n\n"
_HEAD = b"HTTP/1.1 %s\r\ncontent-type: text/event-stream\r\nconnection: close\r\n"
_OK = _HEAD % b"200 OK"

Lie = Callable[[dict[str, Any]], AsyncIterator[bytes]]
"""Yields the bytes sent to a request for lines, which is given."""


def reply(id: str, **fields: Any) -> dict[str, Any]:
    """What a server answers to a line of one prompt and one sample, but for these fields."""
    return {
        "id": id,
        "object": "text_completion",
        "created": 7,
        "model": "tiny",
        "choices": [{"index": 0, "text": "b", "finish_reason": "length"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
        **fields,
    }


def _event(id: str, body: bytes) -> bytes:
    return b'data: {"id":%s,"body":%s}\n\n' % (json.dumps(id).encode(), body)


def _true(asked: dict[str, Any], line: dict[str, Any]) -> dict[str, Any]:
    named = {"created": asked["created_unix"], "model": asked["identity"]["served_model_name"]}
    return reply(line["id"], **named)


def _answers(make: Callable[[dict[str, Any]], bytes]) -> Lie:
    """Answer each line by what is made of its true reply."""

    async def send(asked: dict[str, Any]) -> AsyncIterator[bytes]:
        yield _OK + b"\r\n" + _ALIVE
        for line in asked["lines"]:
            yield _event(line["id"], make(_true(asked, line)))

    return send


def _with(**fields: Any) -> Lie:
    return _answers(lambda true: json.dumps({**true, **fields}).encode())


def _used(**fields: Any) -> Lie:
    return _with(usage={"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2} | fields)


def _choices(*choices: tuple[Any, Any]) -> Lie:
    return _with(
        choices=[{"index": index, "text": "b", "finish_reason": end} for index, end in choices]
    )


def _says(*parts: bytes) -> Lie:
    """Send these bytes, whatever was asked, and end."""

    async def send(_asked: dict[str, Any]) -> AsyncIterator[bytes]:
        for part in parts:
            yield part

    return send


def _goes_on(begin: bytes, part: bytes, pause_s: float = 0.0) -> Lie:
    """Send these bytes, and then others until the connection is closed."""

    async def send(_asked: dict[str, Any]) -> AsyncIterator[bytes]:
        yield begin
        while True:
            yield part
            await asyncio.sleep(pause_s)

    return send


async def _twice(asked: dict[str, Any]) -> AsyncIterator[bytes]:
    yield _OK + b"\r\n"
    for line in asked["lines"]:
        true = _true(asked, line)
        yield _event(line["id"], json.dumps(true).encode())
        other = {"choices": [{"index": 0, "text": "other", "finish_reason": "stop"}]}
        yield _event(line["id"], json.dumps({**true, **other}).encode())


async def _never_ends(asked: dict[str, Any]) -> AsyncIterator[bytes]:
    yield _OK + b"\r\n"
    for line in asked["lines"]:
        yield _event(line["id"], json.dumps(_true(asked, line)).encode())
    while True:
        yield _ALIVE
        await asyncio.sleep(0.001)


def _refused(**fields: Any) -> Lie:
    async def send(asked: dict[str, Any]) -> AsyncIterator[bytes]:
        yield _OK + b"\r\n"
        for line in asked["lines"]:
            refusal = {"id": line["id"], "code": "invalid_request", "message": "no", **fields}
            yield b"data: %s\n\n" % json.dumps({"id": line["id"], "refusal": refusal}).encode()

    return send


def _status(code: bytes, body: bytes, *fields: bytes) -> bytes:
    return b"".join((_HEAD % code, *(field + b"\r\n" for field in fields), b"\r\n", body))


_BOMB = gzip.compress(b"\n" * 2**24)
ANSWERED: dict[str, Lie] = {
    "a second answer": _twice,
    "no end": _never_ends,
}
"""Lies beside true answers, which count."""
LIES: dict[str, Lie] = {
    "nothing": _answers(lambda _: b"{}"),
    "null": _answers(lambda _: b"null"),
    "a number": _answers(lambda _: b"1"),
    "an error": _answers(lambda _: b'{"error":{"message":"no"}}'),
    "no choices": _with(choices=[]),
    "a choice more": _choices((0, "stop"), (1, "stop")),
    "a choice twice": _choices((0, "stop"), (0, "stop")),
    "another index": _choices((1, "stop")),
    "an index of 10**30": _choices((10**30, "stop")),
    "an index that is none": _choices(("0", "stop")),
    "a choice that failed": _choices((0, "error")),
    "a choice that has not ended": _choices((0, None)),
    "choices that are none": _with(choices=[1]),
    "no text": _with(choices=[{"index": 0, "finish_reason": "stop"}]),
    "a chat": _with(choices=[{"index": 0, "message": {"content": ""}, "finish_reason": "stop"}]),
    "another id": _with(id="a-0"),
    "another model": _with(model="another"),
    "another time": _with(created=8),
    "no usage": _with(usage=None),
    "tokens below none": _used(completion_tokens=-5, total_tokens=-4),
    "prompts below none": _used(prompt_tokens=-5, total_tokens=-4),
    "10**30 tokens": _used(completion_tokens=10**30, total_tokens=10**30 + 1),
    "more tokens than were asked": _used(completion_tokens=17, total_tokens=18),
    "another sum": _used(total_tokens=5),
    "tokens that are none": _used(completion_tokens=None),
    "no number": _answers(
        lambda true: json.dumps(true).replace('"completion_tokens": 1', '"completion_tokens": NaN')
        .encode()
    ),
    "bytes that are no text": _answers(
        lambda true: json.dumps(true).encode().replace(b'"b"', b'"\xff"')
    ),
    "several lines": _answers(lambda true: json.dumps(true, indent=1).encode()),
    "deep nesting": _answers(lambda _: b"[" * 100_000),
    "a long text": _with(choices=[{"index": 0, "text": "x" * 2**20, "finish_reason": "stop"}]),
    "a long field that nobody reads": _with(more="x" * 2**20),
    "no JSON": _says(_OK, b"\r\n", b"data: {\n\n"),
    "a line that it does not have": _says(_OK, b"\r\n", _event("another", b"{}")),
    "a refusal of its own": _refused(),
    "a refusal of no code of ours": _refused(code="x" * 100),
    "a refusal by its time": _refused(code="request_timeout"),
    "a refusal by its length": _refused(code="body_too_large"),
    "a refusal that is none": _refused(code=5),
    "no answer": _says(_OK, b"\r\n", _ALIVE),
    "half an answer": _says(_OK, b"\r\n", b'data: {"id":"a-1","body":{"id":'),
    "an answer without end": _goes_on(_OK + b'\r\ndata: {"id":"a-1","body":"', KIB * 64),
    "bytes without end": _goes_on(_OK + b"\r\n", KIB * 64),
    "signs of life without end": _goes_on(_OK + b"\r\n", _ALIVE * 1000),
    "a sign of life now and then": _goes_on(_OK + b"\r\n", _ALIVE, 0.01),
    "a byte now and then": _goes_on(_OK + b"\r\n", b"d", 0.01),
    "a byte of the head now and then": _goes_on(_OK, b"a", 0.01),
    "headers without end": _goes_on(_OK, b"a: " + KIB + b"\r\n"),
    "a header without end": _goes_on(_OK + b"a: ", KIB),
    "a status without end": _goes_on(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "silence": _goes_on(b"", b"", 0.01),
    "no HTTP": _says(b"\x00\xff" * 100 + b"\r\n\r\n"),
    "no status": _says(b"HTTP/1.1 99999 what\r\n\r\n"),
    "an upgrade": _says(b"HTTP/1.1 101 Switching\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n"),
    "nothing at all": _says(),
    "an odd charset": _says(
        b"HTTP/1.1 500 no\r\ncontent-type: text/plain; charset=no\xff;\r\nconnection: close",
        b"\r\n\r\nwhy",
    ),
    "a charset that python has": _says(
        b"HTTP/1.1 503 no\r\ncontent-type: text/plain; charset=hex\r\nconnection: close\r\n\r\n",
        b"why",
    ),
    "an error without end": _goes_on(_status(b"500 no", b""), KIB * 64),
    "a length error without end": _goes_on(_status(b"413 no", b""), KIB * 64),
    "a redirect": _says(_status(b"307 there", b"", b"location: http://127.0.0.1:9/")),
    "a redirect to itself": _says(_status(b"307 there", b"", b"location: /v1/worker/lines")),
    "a redirect to nowhere": _says(_status(b"302 there", b"", b"location: http://[/")),
    "a bomb": _says(_status(b"200 OK", _BOMB, b"content-encoding: gzip")),
    "a bomb of an error": _says(_status(b"500 no", _BOMB, b"content-encoding: gzip")),
    "an encoding that is none": _says(_status(b"200 OK", _ALIVE, b"content-encoding: \xff")),
    "a length that is none": _says(_status(b"200 OK", _ALIVE, b"content-length: -1")),
    "two lengths": _says(_status(b"200 OK", _ALIVE, b"content-length: 1", b"content-length: 2")),
    "chunks that are none": _says(_status(b"200 OK", b"zz\r\n", b"transfer-encoding: chunked")),
    "cookies": _says(_status(b"500 no", b"", *[b"set-cookie: a=" + KIB] * 50)),
}  # fmt: skip
"""What is answered in place of lines."""


def status_of(message: bytes, *fields: bytes, code: bytes = b"200 OK") -> Lie:
    """The reply to the question what it is."""
    return _says(_status(code, message, *fields))


_SIZES = {"num_slots": 4, "max_waiting": 100, "running": 0, "waiting": 0}


def _sized(**fields: Any) -> Callable[[dict[str, Any]], Lie]:
    return lambda true: status_of(json.dumps({**true, **fields}).encode())


TRUTH = _sized()
"""What it is, of which half of its lies are told: whoever lies of itself is sent no lines."""
SELF_LIES: dict[str, Callable[[dict[str, Any]], Lie]] = {
    "10**30 slots": _sized(num_slots=10**30),
    "slots below none": _sized(num_slots=-1),
    "slots that are no number": _sized(num_slots=float("nan")),
    "slots without end": _sized(num_slots=float("inf")),
    "room below none": _sized(max_waiting=-(10**30)),
    "running below none": _sized(running=-(10**30)),
    "an instance of megabytes": _sized(instance="x" * 2**22),
    "no instance": _sized(instance=""),
    "an identity of megabytes": _sized(identity={"x" * 2**22: "y"}),
    "an identity of many": _sized(identity={f"{number}\n": "y" for number in range(100_000)}),
    "an identity with a line of its own": _sized(identity={"a\nERROR all is lost\x1b[2J": "b"}),
    "no JSON": lambda _: status_of(b"{"),
    "no object": lambda _: status_of(b"[]"),
    "deep nesting": lambda _: status_of(b"[" * 60_000),
    "bytes that are no text": lambda _: status_of(b'{"instance":"\xff"}'),
    "an odd charset": lambda _: LIES["an odd charset"],
    "a charset that python has": lambda _: LIES["a charset that python has"],
    "an error of many lines": lambda _: status_of(
        json.dumps({"error": {"message": "a\nERROR all is lost\x1b[2J" + "x" * 9_000}}).encode(),
        code=b"500 no",
    ),
    "an error that is none": lambda _: status_of(b'{"error":[{}]}', code=b"500 no"),
}  # fmt: skip
"""What it says of itself."""
SELF_LIES |= {
    name: lambda _, lie=LIES[name]: lie  # type: ignore[misc]
    for name in (
        *("bytes without end", "a sign of life now and then", "a byte now and then", "silence"),
        *("a byte of the head now and then", "headers without end", "a header without end"),
        *("a status without end", "no HTTP", "no status", "an upgrade", "nothing at all"),
        *("an error without end", "a redirect", "a redirect to itself", "a redirect to nowhere"),
        *("a bomb", "a bomb of an error", "an encoding that is none", "a length that is none"),
        *("two lengths", "chunks that are none", "cookies"),
    )
}


class LyingWorker:
    """The server, on a port of its own on loopback."""

    def __init__(self, identity: dict[str, str], instance: str = "liar", port: int = 0) -> None:
        """`identity` is that of the server it lies to; `port` 0 stands for any."""
        self.port = port
        self.true = {"instance": instance, "identity": identity, **_SIZES}
        self.lie: Lie = ANSWERED["no end"]
        self.self_lie: Callable[[dict[str, Any]], Lie] = _sized()
        self.posts: list[list[str]] = []
        """Ids of the lines of each request."""
        self.num_open = 0
        """Connections."""
        self.num_sent = 0
        """Bytes that were sent, or lie in the socket."""

    async def __aenter__(self) -> LyingWorker:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_open += 1
        try:
            with suppress(OSError, asyncio.IncompleteReadError):
                head = await reader.readuntil(b"\r\n\r\n")
                lie, asked = self.self_lie(self.true), {}
                if head.startswith(b"POST"):
                    (length,) = (
                        int(line.partition(b":")[2])
                        for line in head.lower().split(b"\r\n")
                        if line.startswith(b"content-length:")
                    )
                    lie, asked = self.lie, json.loads(await reader.readexactly(length))
                    self.posts.append([line["id"] for line in asked["lines"]])
                async for part in lie(asked):
                    writer.write(part)
                    self.num_sent += len(part)
                    await writer.drain()
                    if reader.at_eof():
                        break
        finally:
            self.num_open -= 1
            writer.close()
