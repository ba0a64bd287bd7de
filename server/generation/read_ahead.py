"""Reads an async generator ahead of its consumer. Knows nothing of its items."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TypeVar

_Item = TypeVar("_Item")


async def read_ahead(source: AsyncGenerator[_Item, None]) -> AsyncGenerator[_Item, None]:
    """Yield the items of `source`, read without waiting for the consumer. Raises what it raises."""
    items: deque[_Item] = deque()
    has_come = asyncio.Event()

    async def fill() -> None:
        async with aclosing(source):
            async for item in source:
                items.append(item)
                has_come.set()

    task = asyncio.create_task(fill(), name="read ahead")
    task.add_done_callback(lambda _: has_come.set())
    try:
        while items or not task.done():
            if not items:
                has_come.clear()
                await has_come.wait()
                continue
            yield items.popleft()
        await task  # for what it may have raised
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
