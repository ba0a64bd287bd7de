"""Bodies that are too large, too slow, or too many at once."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Message, Receive

from engine.errors import BodyTooLarge, BodyTooSlow, Overloaded
from server.http.body_limits import FORM_BYTES, BodyLimits, CountedBody


def intake(size: int = 100, held: int = 1_000, timeout_s: float = 5, file: int = 0) -> BodyLimits:
    return BodyLimits(size, held, timeout_s, lambda: 7, file)


def sender(*chunks: bytes) -> Receive:
    """A client that sends these, and then nothing."""
    left = list(chunks)

    async def receive() -> Message:
        if not left:
            await asyncio.Event().wait()
        chunk = left.pop(0)
        return {"type": "http.request", "body": chunk, "more_body": bool(left)}

    return receive


async def read(body: CountedBody) -> int:
    """All of it; its size."""
    size = 0
    while True:
        message = await body()
        size += len(message["body"])
        if not message["more_body"]:
            return size


async def test_a_body_counts_until_it_is_closed_and_is_too_large_as_soon_as_it_is() -> None:
    counted = intake()
    body = CountedBody(counted, sender(b"x" * 60, b"y" * 40))
    assert await read(body) == counted.held_bytes == 100
    body.close()
    body.close()
    assert counted.held_bytes == 0
    with pytest.raises(BodyTooLarge, match="100 bytes"):
        await read(CountedBody(counted, sender(b"x" * 60, b"y" * 41, b"never read")))
    counted.check_announced("100")
    for announced in ("101", "9" * 5_000):
        with pytest.raises(BodyTooLarge):
            counted.check_announced(announced)


async def test_a_file_takes_no_room_and_may_be_larger() -> None:
    counted = intake(held=150, file=1_000)
    counted.check_announced(str(1_000 + FORM_BYTES), is_upload=True)
    with pytest.raises(BodyTooLarge, match="max_file_bytes = 1000"):
        counted.check_announced(str(1_001 + FORM_BYTES), is_upload=True)
    upload = CountedBody(counted, sender(b"x" * 500, b"y" * 500), is_upload=True)
    assert await read(upload) == 1_000
    assert counted.held_bytes == 0
    upload.close()
    assert counted.held_bytes == 0
    with pytest.raises(BodyTooLarge, match="max_file_bytes = 1000"):
        await read(CountedBody(counted, sender(b"x" * FORM_BYTES, b"y" * 1_001), is_upload=True))


async def test_all_bodies_together_are_bounded() -> None:
    counted = intake(held=250)
    bodies = [CountedBody(counted, sender(b"x" * 100)) for _ in range(3)]
    await read(bodies[0])
    await read(bodies[1])
    with pytest.raises(Overloaded) as refused:
        await read(bodies[2])
    assert refused.value.retry_after_s == 7
    with pytest.raises(Overloaded):  # before anything is read
        counted.check_announced("1")
    counted.check_announced("")
    for body in bodies:
        body.close()
    counted.check_announced("1")
    assert await read(CountedBody(counted, sender(b"x" * 100))) == 100


async def test_a_body_that_stops_coming_is_too_slow() -> None:
    with pytest.raises(BodyTooSlow, match="only 0 bytes"):
        await read(CountedBody(intake(timeout_s=0.05), sender()))
    counted = intake(10**6, 10**6)
    body = CountedBody(counted, sender(b"x" * 160 * 1024, b""))
    assert body.time_left_s(4) == 1
    await body()
    assert body.time_left_s(4) == 11


async def test_waiting_for_the_client_to_leave_takes_as_long_as_it_takes() -> None:
    counted = intake(timeout_s=0.01)
    body = CountedBody(counted, sender(b"x"))
    await read(body)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await body()
