"""Reads an async generator ahead of its consumer, who does not hold it up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import TypeVar

_Item = TypeVar("_Item")
_MOST_ITEMS = 64
"""Most items that wait without being joined."""


async def read_ahead(
    source: AsyncGenerator[_Item, None], join: Callable[[list[_Item]], _Item]
) -> AsyncGenerator[_Item, None]:
    """Yield all that has come of `source` since the last time, joined to one item. Raises what the
    source raises."""
    items: list[_Item] = []
    has_come = asyncio.Event()

    async def fill() -> None:
        async with aclosing(source):
            async for item in source:
                items.append(item)
                if len(items) > _MOST_ITEMS:
                    items[:] = [join(items)]
                has_come.set()

    task = asyncio.create_task(fill(), name="read ahead")
    task.add_done_callback(lambda _: has_come.set())
    try:
        while items or not task.done():
            if not items:
                has_come.clear()
                await has_come.wait()
                continue
            item, items[:] = join(items), []
            yield item
        await task  # for what it may have raised
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
