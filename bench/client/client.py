"""`srm bench client`: processor time that a streamed request costs a client, ours beside others.

All read the same replies with the same parser of events, so what differs is HTTP. The others are
measured if they are installed. Knows no scenarios.
"""

from __future__ import annotations

import asyncio
import gc
import importlib.metadata
import importlib.util
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from statistics import median
from typing import Any

import httpx
import uvloop

from bench.frame import Record, Settings, run, table
from bench.host.serving import serving
from loadtest.client.client import Client
from loadtest.client.reply import Reply
from loadtest.client.request_attempt import RequestAttempt
from loadtest.client.target import Target, resolve
from loadtest.scenario import Scenario
from loadtest.workload.workload import RequestPlan, Workload

_HEADERS = {"content-type": "application/json"}


class ClientBenchConfig(Settings, frozen=True, forbid_unknown_fields=True):
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
        super().__post_init__()
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
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        def post(body: bytes) -> AbstractAsyncContextManager[Any]:
            answer: AbstractAsyncContextManager[Any] = session.post(
                _url(target), data=body, headers=_HEADERS
            )
            return answer

        return await _all(post, lambda answer: answer.content.iter_any(), config, bodies)


async def _httpx(target: Target, config: ClientBenchConfig, bodies: list[bytes]) -> int:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(limits=limits, timeout=None) as http:

        def post(body: bytes) -> AbstractAsyncContextManager[Any]:
            return http.stream("POST", _url(target), content=body, headers=_HEADERS)

        return await _all(post, lambda answer: answer.aiter_raw(), config, bodies)


def _url(target: Target) -> str:
    return f"http://{target.address}:{target.port}/v1/completions"


async def _all(
    post: Callable[[bytes], AbstractAsyncContextManager[Any]],
    parts: Callable[[Any], AsyncIterator[bytes]],
    config: ClientBenchConfig,
    bodies: list[bytes],
) -> int:
    """Send all bodies, `concurrency` at a time; return the sum of their tokens."""
    left = iter(bodies)

    async def some() -> int:
        tokens = 0
        for body in left:
            reply = Reply(stream=True, keep_text=False)
            async with post(body) as answer:
                async for data in parts(answer):
                    reply.feed(data)
            reply.finish()
            tokens += reply.tokens
        return tokens

    return sum(await asyncio.gather(*(some() for _ in range(config.concurrency))))


CLIENTS = {"loadtest": _ours, "aiohttp": _aiohttp, "httpx": _httpx}


def main(argv: list[str]) -> int:
    """Measure, write a record, print its table."""
    return run(ClientBenchConfig, argv, "client", measure, markdown)


def measure(config: ClientBenchConfig) -> Record:
    """Return each client's processor seconds a request and requests a second, and its version."""
    names = [name for name in CLIENTS if name == "loadtest" or importlib.util.find_spec(name)]
    workload = Workload(Scenario(served_model_name="canned"))
    bodies = [workload.request(index).body for index in range(config.requests)]
    costs: dict[str, list[float]] = {name: [] for name in names}
    rates: dict[str, list[float]] = {name: [] for name in names}
    canned = ("-m", "bench.client.canned")
    with serving(f"--max-tokens={config.max_tokens}", program=canned) as server:
        target = asyncio.run(resolve(Scenario(url=server.url)))
        for _ in range(config.repetitions):
            for name in names:
                gc.collect()
                began, cpu = time.perf_counter(), time.process_time()
                tokens = uvloop.run(CLIENTS[name](target, config, bodies))
                costs[name].append((time.process_time() - cpu) / config.requests)
                rates[name].append(config.requests / (time.perf_counter() - began))
                assert tokens == config.requests * config.max_tokens, f"{name}: {tokens} tokens"
    versions = {name: importlib.metadata.version(name) for name in names if name != "loadtest"}
    return {"versions": versions, "cpu_s_per_request": costs, "requests_per_s": rates}


def markdown(record: Record) -> list[str]:
    """Render the record as a table."""
    settings, costs = record["settings"], record["cpu_s_per_request"]
    ours, rows = median(costs["loadtest"]), []
    for name, cost in costs.items():
        each = [1e6 * one for one in cost]
        rows.append(
            f"{name} {record['versions'].get(name, '')} | {median(each):.0f} ({min(each):.0f}, "
            f"{max(each):.0f}) | {median(cost) / ours:.1f} "
            f"| {median(record['requests_per_s'][name]):.0f}"
        )
    return [
        f"{settings['requests']} streamed requests of {settings['max_tokens']} tokens, "
        f"{settings['concurrency']} at a time, over loopback; median of "
        f"{settings['repetitions']} runs (least, most). The same parser of events in all.",
        "",
        *table("client | CPU per request, µs | to ours | requests/s", rows),
    ]
