"""What streams cost at least: a program that does nothing but format an event and write it.

It writes events of the server's own size to all streams once a step, over uvloop. The reader, which
`srm serve` gets too, counts events and decodes nothing. Each is a process.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import resource
import selectors
import socket
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, cast

import uvloop

_EVENT = (
    b'data: {"id":"cmpl-%032x","object":"text_completion","created":1795177815,"model":"demo",'
    b'"choices":[{"index":0,"text":"%b","logprobs":null,"finish_reason":null,"stop_reason":null}]}'
    b"\n\n"
)
_MARK = b"data: {"
"""Bytes that begin an event."""
_READ_BYTES = 65_536
_SPAWN = multiprocessing.get_context("spawn")


class Bare(NamedTuple):
    """The times of the bare program, besides those of the reader."""

    user_us: float
    """Microseconds of processor time that the program took for an event, outside the kernel."""
    system_us: float
    events_per_s: float


class Reading(NamedTuple):
    """The counts and times of a reader."""

    events: int
    seconds: float
    """Seconds from its first byte to its last."""
    cpu_s: float


def bare_streams(streams: int, steps: int, pause_s: float) -> tuple[Bare, Reading]:
    """Write one event a step to each stream, with a pause between two steps."""
    ends, process = _start(_serve, streams, steps, pause_s)
    port = ends.recv()
    reading = read(port, b"", streams)
    bare: Bare = ends.recv()
    process.join()
    return bare, reading


def read(port: int, request: bytes, streams: int) -> Reading:
    """Open connections in a process of their own, send each the request, read until they close."""
    ends, process = _start(_read, port, request, streams)
    reading: Reading = ends.recv()
    process.join()
    return reading


def _start(
    target: Callable[..., None], *arguments: Any
) -> tuple[Connection, multiprocessing.process.BaseProcess]:
    ends, theirs = _SPAWN.Pipe()
    process = _SPAWN.Process(target=target, args=(theirs, *arguments))
    process.start()
    theirs.close()  # so that its death is an end of file
    return ends, process


def _allow_files() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _cpu() -> tuple[float, float]:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime, used.ru_stime


def _read(ends: Connection, port: int, request: bytes, streams: int) -> None:
    _allow_files()
    selector, events, started = selectors.DefaultSelector(), 0, 0.0
    for _ in range(streams):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall(request)
        connection.setblocking(False)
        selector.register(connection, selectors.EVENT_READ)
    cpu, tails = sum(_cpu()), dict.fromkeys(selector.get_map(), b"")
    while tails:
        for key, _ in selector.select():
            data = key.fileobj.recv(_READ_BYTES)  # type: ignore[union-attr]
            started = started or time.monotonic()
            events += (tails[key.fd] + data).count(_MARK)
            tails[key.fd] = data[1 - len(_MARK) :]  # an event may begin in two reads
            if not data:
                selector.unregister(key.fileobj)
                del tails[key.fd]
    ends.send(Reading(events, time.monotonic() - started, sum(_cpu()) - cpu))


def _serve(ends: Connection, streams: int, steps: int, pause_s: float) -> None:
    _allow_files()
    uvloop.run(_write(ends, streams, steps, pause_s))


async def _write(ends: Connection, streams: int, steps: int, pause_s: float) -> None:
    transports: list[asyncio.Transport] = []
    are_there, are_gone = asyncio.Event(), asyncio.Event()

    class BareStream(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            transports.append(cast(asyncio.Transport, transport))  # uvloop's is none by class
            if len(transports) == streams:
                are_there.set()

        def connection_lost(self, _: Exception | None) -> None:
            transports.pop()
            if not transports:
                are_gone.set()

    loop = asyncio.get_running_loop()
    server = await loop.create_server(BareStream, "127.0.0.1", 0, backlog=streams)
    ends.send(server.sockets[0].getsockname()[1])
    await are_there.wait()
    (user, system), started = _cpu(), time.monotonic()
    for step in range(steps):
        for transport in transports:
            event = _EVENT % (step, b" 42")
            transport.write(b"%x\r\n%b\r\n" % (len(event), event))
        await asyncio.sleep(pause_s)
    seconds, events = time.monotonic() - started, streams * steps
    user_us, system_us = (
        1e6 * (now - before) / events for now, before in zip(_cpu(), (user, system), strict=True)
    )
    for transport in transports:
        transport.close()
    await are_gone.wait()
    server.close()
    ends.send(Bare(user_us, system_us, events / seconds))
