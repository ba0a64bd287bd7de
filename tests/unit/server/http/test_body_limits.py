"""Bodies that are too large, too slow, or too many at once."""

from __future__ import annotations

import asyncio

import pytest
from starlette.requests import Request
from starlette.types import Message, Receive

from srm.errors import Overloaded
from srm.server.errors import BodyTooLarge, BodyTooSlow
from srm.server.http.auth import FORM_BYTES, BodyLimits, CountedBody
from srm.server.http.bodies import read_body


def intake(size: int = 100, held: int = 1_000, timeout_s: float = 5, file: int = 0) -> BodyLimits:
    return BodyLimits(size, held, timeout_s, lambda: 7, file)


def send_chunks(*chunks: int) -> Receive:
    """A client that sends chunks of these sizes, and then nothing."""
    left = list(chunks)

    async def receive() -> Message:
        if not left:
            await asyncio.Event().wait()
        size = left.pop(0)
        return {"type": "http.request", "body": bytes(size), "more_body": bool(left)}

    return receive


async def read(limits: BodyLimits, *chunks: int, is_upload: bool = False) -> CountedBody:
    """All of a body is read; `num_bytes` is its size."""
    body = CountedBody(limits, send_chunks(*chunks), is_upload)
    while (await body())["more_body"]:
        pass
    return body


async def test_a_body_counts_until_it_is_closed() -> None:
    limits = intake()
    body = await read(limits, 60, 40)
    assert body.num_bytes == limits.held_bytes == 100
    body.close()
    body.close()
    assert limits.held_bytes == 0
    with pytest.raises(BodyTooLarge, match="100 bytes"):
        await read(limits, 60, 41, 10**9)
    limits.check_announced("100")
    for announced in ("101", "9" * 5_000):
        with pytest.raises(BodyTooLarge):
            limits.check_announced(announced)


async def test_a_route_may_take_less_than_the_server() -> None:
    scope = {"type": "http", "headers": []}
    assert len(await read_body(Request(scope, send_chunks(6, 4)), 10)) == 10
    with pytest.raises(BodyTooLarge, match="10 bytes"):
        await read_body(Request(scope, send_chunks(6, 5, 10**9)), 10)


async def test_a_file_takes_no_room_and_may_be_larger() -> None:
    limits = intake(held=150, file=1_000)
    limits.check_announced(str(1_000 + FORM_BYTES), is_upload=True)
    with pytest.raises(BodyTooLarge, match="max_file_bytes = 1000"):
        limits.check_announced(str(1_001 + FORM_BYTES), is_upload=True)
    upload = await read(limits, 500, 500, is_upload=True)
    assert (upload.num_bytes, limits.held_bytes) == (1_000, 0)
    upload.close()
    assert limits.held_bytes == 0
    with pytest.raises(BodyTooLarge, match="max_file_bytes = 1000"):
        await read(limits, FORM_BYTES, 1_001, is_upload=True)


async def test_all_bodies_together_are_bounded() -> None:
    limits = intake(held=250)
    bodies = [await read(limits, 100), await read(limits, 100)]
    bodies.append(CountedBody(limits, send_chunks(100)))
    with pytest.raises(Overloaded) as refused:
        await bodies[2]()
    assert refused.value.retry_after_s == 7
    with pytest.raises(Overloaded):  # before anything is read
        limits.check_announced("1")
    limits.check_announced("")
    for body in bodies:
        body.close()
    limits.check_announced("1")
    await read(limits, 100)


async def test_one_keys_bodies_leave_the_others_half_of_the_room() -> None:
    limits = intake(held=200)

    def count_body(owner: str, *chunks: int) -> CountedBody:
        body = CountedBody(limits, send_chunks(*chunks))
        body.owner = owner
        return body

    slow = [count_body("a", size, 1) for size in (60, 40, 1)]
    for body in slow[:2]:
        await body()
    with pytest.raises(Overloaded, match="requests of this key hold 101 of at most 100 bytes"):
        await slow[2]()
    with pytest.raises(Overloaded, match="requests of this key"):
        limits.check_announced("1", owner="a")
    limits.check_announced("1", owner="b")
    other = count_body("b", 80)
    await other()
    for body in (*slow, other):
        body.close()
    assert (limits.held_bytes, limits.held_by) == (0, {})
    narrow = intake(size=100, held=100)
    alone = CountedBody(narrow, send_chunks(100))
    alone.owner = "a"
    await alone()  # one body may be larger than half


async def test_a_body_that_stops_coming_is_too_slow() -> None:
    with pytest.raises(BodyTooSlow, match="only 0 bytes"):
        await read(intake(timeout_s=0.05))


async def test_bytes_that_came_buy_no_later_silence() -> None:
    body = CountedBody(intake(timeout_s=5), send_chunks())
    body.spend(4, 0)
    assert body.left_s == 1
    body.spend(0, 32 * 1024)
    assert body.left_s == 3
    body.spend(0, 33_000_000)
    assert body.left_s == 5
    body.spend(1, 16 * 1024)  # at the least rate, for as long as it takes
    assert body.left_s == 5


async def test_waits_without_a_limit_for_a_client_to_leave() -> None:
    body = await read(intake(timeout_s=0.01), 1)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await body()
