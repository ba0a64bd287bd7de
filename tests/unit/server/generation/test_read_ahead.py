"""A source is read while nobody takes, and ends with whoever does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from server.generation.read_ahead import read_ahead


@pytest.mark.parametrize("fails", [False, True])
async def test_what_a_source_raises_comes_last_and_who_leaves_early_ends_it(fails: bool) -> None:
    seen: list[int | str] = []

    async def source() -> AsyncGenerator[int, None]:
        try:
            for number in range(3):
                seen.append(number)
                yield number
            if fails:
                raise ValueError("no more")
            await asyncio.Event().wait()
        finally:
            seen.append("closed")

    ahead = read_ahead(source())
    assert await anext(ahead) == 0
    await asyncio.sleep(0)
    assert seen == [0, 1, 2, *["closed"] * fails]
    assert [await anext(ahead), await anext(ahead)] == [1, 2]
    if fails:
        with pytest.raises(ValueError, match="no more"):
            await anext(ahead)
    await ahead.aclose()
    assert seen == [0, 1, 2, "closed"]
