"""Clients that leave at any point, politely or not: nothing they asked for goes on or stays."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from srm.engine.config import DEMO_MODEL
from tests.kit.processes.held_engine import held
from tests.kit.serving import CHATS, COMPLETIONS, SERVER_FLAGS, Server, free_port, wait_until

POINTS = ("connecting", "headers", "body", "waiting", "computing", "streaming", "never")
"""When a client leaves: with nothing sent, within the headers or the body, at once or a while after
the body, after some events, or with the whole reply."""
AT_ONCE = 100
"""Clients that are there at a time: more than there are slots, so some leave while they wait."""


def request(rng: random.Random) -> bytes:
    """One that takes a while, if it may."""
    path = COMPLETIONS
    body: dict[str, Any] = {"prompt": [rng.randrange(2, 300)] * rng.choice((1, 5, 60, 100))}
    if rng.random() < 0.2:
        path, body = CHATS, {"messages": [{"role": "user", "content": "the cat"}]}
    elif rng.random() < 0.2:
        body |= {"logprobs": 2, "echo": rng.random() < 0.5, "stop": "zzz"}
    numbers = {"n": rng.choice((1, 1, 4, 20)), "max_tokens": rng.randint(1, 28)}
    body |= {**numbers, "ignore_eos": True, "stream": rng.random() < 0.6}
    encoded = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n".encode()
    return head + b"Content-Length: %d\r\n\r\n" % len(encoded) + encoded


async def visit(server: Server, rng: random.Random, point: str) -> None:
    """Send a request up to a point and leave there; one that stays must get its reply."""
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
    if point == "computing":
        await asyncio.sleep(rng.random() * 0.2)
    elif point == "streaming":
        for _ in range(rng.randint(1, 20)):
            await reader.read(rng.randint(1, 4_000))
    elif point == "never":
        received = await reader.read()
        assert received.startswith(b"HTTP/1.1 200 "), received[:500]
        assert b'"finish_reason":"length"' in received
    if rng.random() < 0.5:
        writer.transport.abort()  # a reset, where there is something unread
    else:
        writer.close()


async def check(server: Server, num_clients: int) -> None:
    aborted = server.metric("srm_engine_requests_total", "aborted")
    rng = random.Random(3)
    room = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> None:
        async with room, asyncio.timeout(60):
            await visit(server, random.Random(rng.random()), POINTS[number % len(POINTS)])

    async with asyncio.TaskGroup() as group:
        for number in range(num_clients):
            group.create_task(one(number))
    await asyncio.to_thread(server.wait_until_idle)
    assert server.metric("srm_engine_requests_total", "aborted") > aborted
    assert server.metric("http_requests_in_flight") == 1  # the one that asks
    steps = server.metric("srm_engine_steps_total")
    await asyncio.sleep(0.2)
    assert server.metric("srm_engine_steps_total") == steps  # nothing goes on unseen
    assert server.post(max_tokens=2).status_code == 200


async def test_200_clients_that_leave_leave_nothing_behind(server: Server) -> None:
    await check(server, 200)


@pytest.mark.slow
async def test_1000_clients_that_leave_the_demo_model() -> None:
    with Server(DEMO_MODEL, "--num-slots=64", engine_module="srm.engine", start_s=600) as running:
        await check(running, 1_000)


def connect(
    server: Server, times: int = 1, key: str = "", path: str = COMPLETIONS, **fields: Any
) -> socket.socket:
    """A client that has sent a request, of completions if not otherwise said, so many times."""
    address = urlsplit(server.url)
    own = {} if "tree" in fields else {"max_tokens": 60}
    body = json.dumps({"prompt": [5], "ignore_eos": True, **own, **fields})
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nX-Api-Key: {key}\r\n"
    client = socket.create_connection((address.hostname, address.port))
    client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode() * times)
    return client


@pytest.fixture(scope="module")
def holding(text_model: Path) -> Iterator[Server]:
    """A server whose engine may be held."""
    module = "tests.kit.processes.held_engine"
    with Server(text_model, *SERVER_FLAGS, engine_module=module) as running:
        yield running


def test_a_client_that_has_sent_its_next_request_can_leave_too(
    holding: Server, text_model: Path
) -> None:
    """The first one is what runs, and ends though the engine is held."""
    for is_stream in (True, False):
        with held(text_model):
            with connect(holding, times=2, stream=is_stream):
                wait_until(lambda: holding.metric("srm_engine_running_sequences") == 1)
            holding.wait_until_idle(60)
    wait_until(lambda: "".join(holding.lines).count("status=499") == 2)
    assert "ERROR" not in "".join(holding.lines)


def test_tokens_of_clients_that_left_are_counted(holding: Server, text_model: Path) -> None:
    """A whole reply's were observed as 0. The engine says how many it has sampled."""
    observed, made = "srm_request_generation_tokens", "srm_engine_decode_tokens_total"
    made_before, *before = (
        holding.metric(name) for name in (made, f"{observed}_count", f"{observed}_sum")
    )
    sampled = 0
    kinds: list[dict[str, Any]]
    kinds = [{}, {"n": 3}, {"stop": "zzz"}, {"logprobs": 1}, {"stream": True}]
    for number, fields in enumerate(kinds, 1):
        holding.wait_until_idle(60)
        sampled += 3 * fields.get("n", 1)
        with held(text_model, steps=3):
            with connect(holding, **fields):
                wait_until(lambda: holding.metric(made) == made_before + sampled)  # noqa: B023
            wait_until(lambda: holding.metric(f"{observed}_count") == before[0] + number)  # noqa: B023
            assert holding.metric(f"{observed}_sum") == before[1] + sampled, fields


def test_clients_that_left_pay_for_what_was_sampled(text_model: Path, tmp_path: Path) -> None:
    tree = {"path": "/v1/trees", "tree": {"branching": 60, "node_tokens": 60, "depth": 1}}
    kinds: list[dict[str, Any]]
    kinds = [{"n": 60}, {"n": 60, "stream": True}, tree, {**tree, "stream": True}]
    keys = {f"key{number}": f"{number}" * 16 for number in range(len(kinds) + 1)}
    (tmp_path / "keys").write_text("".join(f"{name} {key}\n" for name, key in keys.items()))
    limits = (f"--api-keys-file={tmp_path / 'keys'}", "--tokens-per-minute=2")
    flags = (*SERVER_FLAGS, *limits, f"--admin-port={free_port()}", "--max-state-bytes=1")
    module = "tests.kit.processes.held_engine"
    made = "srm_engine_decode_tokens_total"
    with Server(text_model, *flags, engine_module=module) as server:
        for number, key in enumerate(keys.values()):
            headers, before = {"x-api-key": key}, server.metric(made)
            if number == len(kinds):  # a state that is read, and not kept
                asked: Any = {"prompt": [5, 6, 7]}
                reply = server.http.post("/v1/states", json=asked, headers=headers)
                assert reply.status_code == 403, reply.text
            else:
                with held(text_model, steps=3), connect(server, key=key, **kinds[number]):
                    wait_until(lambda: server.metric(made) > before)  # noqa: B023
                server.wait_until_idle()

            def refused(headers: dict[str, str] = headers) -> bool:
                body = {"prompt": "a", "n": -1}
                return server.http.post(COMPLETIONS, json=body, headers=headers).status_code == 429

            wait_until(refused)
