"""A source is read while nobody takes, and ends with whoever does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from itertools import chain

import pytest

from srm.server.generation.read_ahead import read_ahead


@pytest.mark.parametrize("fails", [False, True])
async def test_an_error_of_a_source_comes_last(fails: bool) -> None:
    seen: list[int | str] = []

    async def source() -> AsyncGenerator[list[int], None]:
        try:
            for number in range(99):
                seen.append(number)
                yield [number]
            if fails:
                raise ValueError("no more")
            await asyncio.Event().wait()
        finally:
            seen.append("closed")

    ahead = read_ahead(source(), lambda items: [*chain(*items)], lambda: seen.append("empty"))
    numbers = [*range(99)]
    assert await anext(ahead) == numbers
    assert seen == ["empty", *numbers, *["closed"] * fails]
    if fails:
        with pytest.raises(ValueError, match="no more"):
            await anext(ahead)
    await ahead.aclose()
    assert seen == ["empty", *numbers, "closed"]


async def test_gives_all_at_once_where_asked() -> None:
    async def source() -> AsyncGenerator[list[int], None]:
        for number in range(3):
            yield [number]
            await asyncio.sleep(0)

    ahead = read_ahead(source(), lambda items: [*chain(*items)], only_whole=True)
    assert [items async for items in ahead] == [[0, 1, 2]]
