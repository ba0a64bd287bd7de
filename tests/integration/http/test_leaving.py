"""Clients that leave at any point, politely or not: nothing they asked for goes on or stays."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from typing import Any
from urllib.parse import urlsplit

import pytest

from engine.config import DEMO_MODEL
from tests.serving import CHATS, COMPLETIONS, Server

POINTS = ("connecting", "headers", "body", "waiting", "computing", "streaming", "never")
"""When a client leaves: with nothing sent, within the headers or the body, at once or a while after
the body, after some events, or with the whole reply."""
AT_ONCE = 100
"""Clients that are there at a time: more than there are slots, so some leave while they wait."""


def request(rng: random.Random) -> bytes:
    """One that takes a while, if it may."""
    body: dict[str, Any] = {
        "prompt": [rng.randrange(2, 300) for _ in range(rng.choice((1, 5, 60, 100)))],
        "n": rng.choice((1, 1, 4, 20)),
        "max_tokens": rng.randint(1, 28),
        "ignore_eos": True,
        "stream": rng.random() < 0.6,
    }
    if rng.random() < 0.2:
        body |= {"logprobs": 2, "echo": rng.random() < 0.5, "stop": "zzz"}
    path = COMPLETIONS
    if rng.random() < 0.2:
        path = CHATS
        body["messages"] = [{"role": "user", "content": "the cat"}]
        body = {
            name: body[name] for name in ("messages", "n", "max_tokens", "ignore_eos", "stream")
        }
    encoded = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n".encode()
    return head + b"Content-Length: %d\r\n\r\n" % len(encoded) + encoded


async def visit(server: Server, rng: random.Random, point: str) -> bytes:
    """Send a request up to a point and leave there; what was received."""
    address = urlsplit(server.url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    whole = request(rng)
    ends = {
        "connecting": 0,
        "headers": rng.randrange(whole.index(b"\r\n\r\n")),
        "body": rng.randrange(whole.index(b"\r\n\r\n") + 4, len(whole)),
    }
    writer.write(whole[: ends.get(point, len(whole))])
    await writer.drain()
    received = b""
    if point == "computing":
        await asyncio.sleep(rng.random() * 0.2)
    elif point == "streaming":
        for _ in range(rng.randint(1, 20)):
            received += await reader.read(rng.randint(1, 4_000))
    elif point == "never":
        received = await reader.read()
    if rng.random() < 0.5:
        writer.transport.abort()  # a reset, where there is something unread
    else:
        writer.close()
    return received


async def visits(server: Server, num_clients: int) -> Counter[str]:
    """So many clients; how many left at each point. Raises if one that stayed got no reply."""
    rng = random.Random(3)
    points: Counter[str] = Counter()
    room = asyncio.Semaphore(AT_ONCE)

    async def one(point: str, own: random.Random) -> None:
        async with room, asyncio.timeout(60):
            received = await visit(server, own, point)
        if point == "never":
            assert received.startswith(b"HTTP/1.1 200 "), received[:500]
            assert b'"finish_reason":"length"' in received

    async with asyncio.TaskGroup() as group:
        for _ in range(num_clients):
            point = rng.choice(POINTS)
            points[point] += 1
            group.create_task(one(point, random.Random(rng.random())))
    return points


async def check(server: Server, num_clients: int) -> None:
    aborted = server.metric("srm_engine_requests_total", "aborted")
    points = await visits(server, num_clients)
    assert set(points) == set(POINTS)
    await asyncio.to_thread(server.wait_until_idle)
    assert server.metric("srm_engine_free_slots") == server.metric("srm_engine_num_slots")
    assert server.metric("srm_engine_requests_total", "aborted") > aborted
    assert server.metric("http_requests_in_flight") == 1  # the one that asks
    steps = server.metric("srm_engine_steps_total")
    await asyncio.sleep(0.2)
    assert server.metric("srm_engine_steps_total") == steps  # nothing goes on unseen
    assert server.post(max_tokens=2).status_code == 200


async def test_200_clients_that_leave_at_any_point_leave_nothing_behind(server: Server) -> None:
    await check(server, 200)


@pytest.mark.slow
async def test_1000_clients_that_leave_the_demo_model() -> None:
    with Server(DEMO_MODEL, "--num-slots=64", engine_module="engine", start_s=600) as running:
        await check(running, 1_000)
