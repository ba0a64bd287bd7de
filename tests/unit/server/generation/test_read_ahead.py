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

    ahead = read_ahead(source(), lambda items: [*chain(*items)])
    numbers = [*range(99)]
    assert await anext(ahead) == numbers
    assert seen == [*numbers, *["closed"] * fails]
    if fails:
        with pytest.raises(ValueError, match="no more"):
            await anext(ahead)
    await ahead.aclose()
    assert seen == [*numbers, "closed"]
