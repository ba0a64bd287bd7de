"""Room: who gets it when there is not enough."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from srm.server.batch.concurrency_limiter import ConcurrencyLimiter, LimiterShare


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("max_lines", "jobs", "expected"),
    [
        (1000, [{}], [40]),
        (7, [{}], [7]),
        (1000, [{"weight": 1}, {"weight": 3}], [10, 30]),
        (1000, [{}, {"priority": 1}], [0, 40]),
        (1000, [{"owner": "a"}, {"owner": "b", "priority": 1}], [20, 20]),
    ],
    ids=["alone", "lines have a limit of their own", "by weight", "by priority", "of two owners"],
)
async def test_room_of_jobs_that_all_want_more(
    max_lines: int, jobs: list[dict[str, Any]], expected: list[int]
) -> None:
    room = ConcurrencyLimiter(40, max_lines)
    shares = [room.share(**job) for job in jobs]

    async def feed(share: LimiterShare) -> None:
        while True:
            await share.acquire(1)

    tasks = [asyncio.create_task(feed(share)) for share in shares]
    await turns()
    for number in range(200):
        holders = [share for share in shares if share.sequences]
        holders[number % len(holders)].free(1)
        await turns()
    assert [share.sequences for share in shares] == expected
    for task in tasks:
        task.cancel()


async def test_a_line_larger_than_the_room_has_its_turn() -> None:
    room = ConcurrencyLimiter(10, 1000)
    large, small = room.share("a"), room.share("b")
    await large.acquire(100)
    for _ in range(5):
        assert await asyncio.wait_for(small.acquire(1), 10)
    waiting = [asyncio.create_task(item) for item in (large.acquire(100), small.acquire(1))]
    await turns()
    assert not any(task.done() for task in waiting)
    large.free(100)
    await turns()
    # Neither starves one of small ones, nor waits until there is nothing else.
    assert [task.done() for task in waiting] == [True, False]
    small.free(1)
    await turns()
    assert waiting[1].done()


async def test_who_waits_and_leaves_holds_nobody_up() -> None:
    room = ConcurrencyLimiter(10, 1000)
    first, second = room.share(), room.share()
    await first.acquire(8)
    large = asyncio.create_task(first.acquire(9))
    await turns()
    large.cancel()
    await turns()
    await second.acquire(2)
    room.resize(20)
    await first.acquire(9)
    assert (first.sequences, second.sequences, room.lines) == (17, 2, 3)


async def test_room_that_is_granted_to_who_leaves_is_given_back() -> None:
    room = ConcurrencyLimiter(10, 1000)
    share = room.share()
    await share.acquire(10)
    waiting = asyncio.create_task(share.acquire(10))
    await turns()
    share.free(10)  # granted now, and cancelled before it can notice
    waiting.cancel()
    await turns()
    assert (share.sequences, room.lines) == (0, 0)


async def test_any_that_wait_may_be_cancelled_at_once() -> None:
    room = ConcurrencyLimiter(10, 1000)
    holder, others = room.share(), [room.share(), room.share()]
    await holder.acquire(10)
    await others[0].acquire(5)  # their part, so that more has to wait
    await others[1].acquire(3)
    waiting = [asyncio.create_task(share.acquire(9)) for share in others]
    await turns()
    for task in waiting:
        task.cancel()
    holder.free(10)  # before any of them can notice
    others[0].give_up()
    ended = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(error) for error in ended] == [asyncio.CancelledError] * 2
    assert (room.lines, room.sequences, room.waiting) == (2, 8, [])
