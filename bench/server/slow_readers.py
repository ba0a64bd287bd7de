"""`srm bench slow-readers`: what streams that read slowly, or leave, do to the others.

All streams of a server run at once, on an engine that computes nothing and sleeps between steps.
First all read what comes. Then half of them read a little now and then, and some leave at random
moments. Compared are the gaps between two reads of a stream that reads all and stays.
"""

from __future__ import annotations

import asyncio
import json
import random
import resource
import socket
from statistics import median
from typing import Any, cast

import httpx
import numpy as np
import uvloop

from bench.frame import Record, Settings, run, table
from bench.host.processes import children_of_server, processes
from bench.host.serving import Serving
from bench.server.streams import sleeping_server

_BUFFER = 4_096
"""Bytes that the kernel keeps for a slow reader, about; it takes as many whenever it reads."""
_TAIL = 512
"""Bytes at a reply's end that are kept."""
_SAMPLE_S = 0.5
GAPS = ("p50", "p99", "max")


class SlowReadersBenchConfig(Settings, frozen=True, forbid_unknown_fields=True):
    """Settings of `srm bench slow-readers`."""

    streams: int = 8_192
    """Number of streams, of one completion each; in the second part every other one reads
    slowly."""
    leave: int = 1_000
    """Number of streams that leave in the second part, at random moments."""
    max_tokens: int = 300
    """Tokens of each completion."""
    logprobs: int = 5
    """Alternatives returned with each token, so that there is much to read; 0: none."""
    step_s: float = 0.4
    """Seconds that a step of the engine takes."""
    pause_s: float = 5.0
    """Seconds between two reads of a slow reader, while others run."""
    seed: int = 0
    """Seed of which streams leave, and when."""


def main(argv: list[str]) -> int:
    """Measure, write a record, print its table."""
    return run(SlowReadersBenchConfig, argv, "slow-readers", measure, markdown)


def measure(config: SlowReadersBenchConfig) -> Record:
    """Return a case where all read, and one where half read slowly and some leave.

    Raises RuntimeError if a stream that stayed lacks a token.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with sleeping_server(config.streams, config.step_s) as server:
        return {
            "cases": [
                uvloop.run(_case(config, server, is_slow)) | {"half_slow": is_slow}
                for is_slow in (False, True)
            ]
        }


class _Reader(asyncio.Protocol):
    """Reads one stream and keeps its end."""

    transport: asyncio.Transport
    tail = b""
    num_bytes = 0

    def __init__(self, request: bytes, is_slow: bool) -> None:
        self._request, self.is_slow = request, is_slow
        self.times: list[float] = []
        self.has_begun, self.has_ended = asyncio.Event(), asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is none by class
        self.transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.has_begun.set()
        self.num_bytes += len(data)
        self.tail = (self.tail + data)[-_TAIL:]
        if self.is_slow:
            self.transport.pause_reading()
        else:
            self.times.append(asyncio.get_running_loop().time())

    def connection_lost(self, _: Exception | None) -> None:
        self.has_begun.set()
        self.has_ended.set()

    def go_on(self) -> None:
        """Read once more, if there is anything."""
        if not self.has_ended.is_set():
            self.transport.resume_reading()


async def _case(config: SlowReadersBenchConfig, server: Serving, half_slow: bool) -> dict[str, Any]:
    readers = [
        await _connect(config, server, half_slow and number % 2 == 1)
        for number in range(config.streams)
    ]
    slow = [one for one in readers if one.is_slow]
    random_ = random.Random(config.seed)
    leaving = random_.sample(readers, min(config.leave, len(readers)) if half_slow else 0)
    staying = [one for one in readers if one not in set(leaving)]
    for one in readers:
        await one.has_begun.wait()
    memory: list[int] = []
    slots: list[int] = []
    watch = asyncio.create_task(_watch(server, memory))
    run_s = config.max_tokens * config.step_s
    leaves = [asyncio.create_task(_leave(one, random_.uniform(0, run_s))) for one in leaving]
    trickle = asyncio.create_task(_trickle(slow, config.pause_s))
    for one in staying:
        if not one.is_slow:
            await one.has_ended.wait()
    await asyncio.gather(*leaves)
    slots.append(await _free_slots(server, config.streams))  # the slow ones have not read yet
    trickle.cancel()
    for one in slow:  # whatever is left
        one.is_slow = False
        one.go_on()
    for one in staying:
        await one.has_ended.wait()
        if b'"completion_tokens":%d' % config.max_tokens not in one.tail:
            raise RuntimeError(f"a stream that stayed ended with {one.tail!r}")
    watch.cancel()
    slots.append(await _free_slots(server, config.streams))
    gaps = np.concatenate([np.diff(one.times) for one in staying if one not in set(slow)])
    return {
        "gap_s": dict(zip(GAPS, np.quantile(gaps, (0.5, 0.99, 1)).tolist(), strict=True)),
        "api_bytes": memory,
        "read_bytes": sum(one.num_bytes for one in readers),
        "free_slots": slots,
    }


async def _connect(config: SlowReadersBenchConfig, server: Serving, is_slow: bool) -> _Reader:
    asked = {"model": "model", "prompt": [1], "max_tokens": config.max_tokens, "stream": True}
    asked |= {"ignore_eos": True, "stream_options": {"include_usage": True}}
    asked |= {"logprobs": config.logprobs} if config.logprobs else {}
    body = json.dumps(asked).encode()
    request = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    request += b"content-length: %d\r\n\r\n%b" % (len(body), body)
    connection = socket.socket()
    if is_slow:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
    connection.connect((server.host, server.port))
    reader = _Reader(request, is_slow)
    await asyncio.get_running_loop().create_connection(lambda: reader, sock=connection)
    return reader


async def _leave(reader: _Reader, after_s: float) -> None:
    await asyncio.sleep(after_s)
    reader.transport.abort()


async def _trickle(slow: list[_Reader], pause_s: float) -> None:
    while True:
        await asyncio.sleep(pause_s)
        for one in slow:
            one.go_on()


async def _watch(server: Serving, memory: list[int]) -> None:
    """Add the API process's memory now and then."""
    table = processes()
    api = next(pid for pid, kind in children_of_server(server.pid, table).items() if kind == "api")
    while True:
        memory.append(processes()[api].rss_bytes)
        await asyncio.sleep(_SAMPLE_S)


async def _free_slots(server: Serving, wanted: int) -> int:
    """Wait until so many slots are free, or some seconds have passed; return how many are."""
    async with httpx.AsyncClient(base_url=server.url) as client:
        for _ in range(40):
            told = (await client.get("/metrics")).text.splitlines()
            found = (one.split()[-1] for one in told if one.startswith("srm_engine_free_slots"))
            if (free := int(sum(map(float, found)))) == wanted:  # no line before the first step
                break
            await asyncio.sleep(0.25)
    return free


def markdown(record: Record) -> list[str]:
    """Render the record as a table."""
    settings, rows = record["settings"], []
    for case in record["cases"]:
        gaps = " | ".join(f"{case['gap_s'][name]:.2f}" for name in GAPS)
        memory = case["api_bytes"]
        first, most = (size / 1e6 for size in (median(memory[:5]), max(memory)))
        who = f"half slow, {settings['leave']:,} leave" if case["half_slow"] else "all read"
        free = ", ".join(f"{slots:,}" for slots in case["free_slots"])
        rows.append(f"{who} | {gaps} | {first:,.0f} | {most:,.0f} | {free}")
    heads = "streams | gap p50, s | p99 | max | API MB at first | at most | free slots after"
    return [
        f"{settings['streams']:,} streams of {settings['max_tokens']} tokens, one in "
        f"{settings['step_s']:g} s; gaps are those of streams that read all and stay. Free slots: "
        "when these have ended, and when all have.",
        "",
        *table(heads, rows),
    ]
