"""`srm bench client`: processor time that a streamed request costs a client, ours beside others.

All read the same replies with the same parser of events, so what differs is HTTP. The others are
measured if they are installed. Knows no scenarios.
"""

from __future__ import annotations

import asyncio
import gc
import importlib.metadata
import importlib.util
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from statistics import median
from typing import Any

import httpx
import msgspec
import uvloop

from engine.records import RECORDS, ROOT, new_record, settings_of, write_record
from engine.settings import load
from loadtest.client.client import Client
from loadtest.client.reply import Reply
from loadtest.client.request_attempt import RequestAttempt
from loadtest.client.target import Target, resolve
from loadtest.scenario import Scenario
from loadtest.workload.workload import RequestPlan, Workload


class ClientBenchConfig(msgspec.Struct, frozen=True):
    """Settings of `srm bench client`."""

    requests: int = 2_000
    """Of each client in each repetition."""
    concurrency: int = 32
    """Requests under way."""
    max_tokens: int = 16
    """Events with a token in each reply."""
    repetitions: int = 5
    """Of which the median counts; clients take turns."""

    def __post_init__(self) -> None:
        for name in ("requests", "concurrency", "max_tokens", "repetitions"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.concurrency > self.requests:
            raise ValueError(
                f"concurrency must be at most requests = {self.requests}, got {self.concurrency}"
            )


async def _ours(target: Target, config: ClientBenchConfig, bodies: list[bytes]) -> int:
    asked = [RequestPlan(body, 1, 32, config.max_tokens) for body in bodies]
    over = asyncio.Event()
    left = iter(range(config.concurrency, config.requests))

    def another(_exchange: RequestAttempt, kind: str) -> None:
        assert kind == "none", client.last_error
        index = next(left, None)
        if index is not None:
            client.send(index, time.monotonic() - started, asked[index])
        elif not client.in_flight:
            over.set()

    started = time.monotonic()
    client = Client(target, Scenario(), 0, started, another, _raise)
    for index in range(config.concurrency):
        client.send(index, 0.0, asked[index])
    await over.wait()
    await client.close()
    return client.output_tokens


def _raise(error: Exception) -> None:
    raise error


async def _aiohttp(target: Target, config: ClientBenchConfig, bodies: list[bytes]) -> int:
    aiohttp: Any = importlib.import_module("aiohttp")
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:

        async def one(body: bytes) -> int:
            reply = Reply(stream=True, keep_text=False)
            headers = {"content-type": "application/json"}
            async with session.post(_url(target), data=body, headers=headers) as answer:
                async for data in answer.content.iter_any():
                    reply.feed(data)
            reply.finish()
            return reply.tokens

        return await _all(one, config, bodies)


async def _httpx(target: Target, config: ClientBenchConfig, bodies: list[bytes]) -> int:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(limits=limits, timeout=None) as http:

        async def one(body: bytes) -> int:
            reply = Reply(stream=True, keep_text=False)
            headers = {"content-type": "application/json"}
            async with http.stream("POST", _url(target), content=body, headers=headers) as answer:
                async for data in answer.aiter_raw():
                    reply.feed(data)
            reply.finish()
            return reply.tokens

        return await _all(one, config, bodies)


def _url(target: Target) -> str:
    return f"http://{target.address}:{target.port}/v1/completions"


async def _all(
    one: Callable[[bytes], Awaitable[int]], config: ClientBenchConfig, bodies: list[bytes]
) -> int:
    """Send all bodies, `concurrency` at a time; return the sum of their tokens."""
    left = iter(bodies)

    async def some() -> int:
        return sum([await one(body) for body in left])

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(some()) for _ in range(config.concurrency)]
    return sum(task.result() for task in tasks)


CLIENTS = {"loadtest": _ours, "aiohttp": _aiohttp, "httpx": _httpx}


def main(argv: list[str]) -> int:
    """Measure and write a record to docs/benchmarks/."""
    config = load(ClientBenchConfig, argv, prog="srm bench client")
    names = [
        name for name in CLIENTS if name == "loadtest" or importlib.util.find_spec(name) is not None
    ]
    workload = Workload(Scenario(served_model_name="canned"))
    bodies = [workload.request(index).body for index in range(config.requests)]
    costs: dict[str, list[float]] = {name: [] for name in names}
    rates: dict[str, list[float]] = {name: [] for name in names}
    url, server = _start(config)
    try:
        target = asyncio.run(resolve(Scenario(url=url)))
        for _ in range(config.repetitions):
            for name in names:
                gc.collect()
                began, cpu = time.perf_counter(), time.process_time()
                tokens = uvloop.run(CLIENTS[name](target, config, bodies))
                costs[name].append((time.process_time() - cpu) / config.requests)
                rates[name].append(config.requests / (time.perf_counter() - began))
                assert tokens == config.requests * config.max_tokens, f"{name}: {tokens} tokens"
    finally:
        server.terminate()
        server.wait()
    versions = {name: importlib.metadata.version(name) for name in names if name != "loadtest"}
    record = new_record(" ".join(["srm bench client", *argv])) | {
        "settings": settings_of(config),
        "versions": versions,
        "cpu_s_per_request": costs,
        "requests_per_s": rates,
    }
    write_record(record, "client", _table(config, costs, rates, versions), RECORDS)
    return 0


def _start(config: ClientBenchConfig) -> tuple[str, subprocess.Popen[str]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = (f"--port={port}", f"--max-tokens={config.max_tokens}")
    server = subprocess.Popen(
        [sys.executable, "-m", "bench.client.canned", *flags],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    assert server.stdout.readline() == "ready\n"
    return f"http://127.0.0.1:{port}", server


def _table(
    config: ClientBenchConfig,
    costs: dict[str, list[float]],
    rates: dict[str, list[float]],
    versions: dict[str, str],
) -> str:
    lines = [
        f"{config.requests} streamed requests of {config.max_tokens} tokens, {config.concurrency} "
        f"at a time, over loopback; median of {config.repetitions} runs (least, most). The same "
        "parser of events in all.",
        "",
        "| client | CPU per request, µs | to ours | requests/s |",
        "|---|---|---|---|",
    ]
    ours = median(costs["loadtest"])
    for name, cost in costs.items():
        each = [1e6 * one for one in cost]
        lines.append(
            f"| {name} {versions.get(name, '')} | {median(each):.0f} ({min(each):.0f}, "
            f"{max(each):.0f}) | {median(cost) / ours:.1f} | {median(rates[name]):.0f} |"
        )
    return "\n".join(lines) + "\n"
