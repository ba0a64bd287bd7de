"""Tasks end with their block, and their errors are those of the block."""

from __future__ import annotations

import asyncio

import pytest

from engine.tasks import beside, task_group


async def forever(ended: list[str]) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        ended.append("beside")


async def test_what_runs_beside_a_block_ends_with_it() -> None:
    ended: list[str] = []
    async with beside(forever(ended)):
        await asyncio.sleep(0)
        assert not ended
    assert ended == ["beside"]


async def test_what_fails_beside_a_block_ends_it() -> None:
    async def fail() -> None:
        raise KeyError("a")

    ended: list[str] = []
    with pytest.raises(KeyError):
        async with beside(fail(), forever(ended)):
            await asyncio.Event().wait()
    assert ended == ["beside"]


async def test_the_error_of_a_block_is_raised_as_it_is() -> None:
    ended: list[str] = []
    with pytest.raises(OSError, match="disk"):
        async with beside(forever(ended)), task_group() as group:
            group.create_task(forever(ended))
            await asyncio.sleep(0)
            raise OSError("disk")
    assert ended == ["beside", "beside"]
