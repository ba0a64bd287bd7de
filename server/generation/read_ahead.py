"""Reads an async generator ahead of its consumer, who does not hold it up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import TypeVar

_Item = TypeVar("_Item")
_MOST_ITEMS = 64
"""Most items that wait without being joined."""


def do_nothing() -> None:
    """Take the place of an `on_empty`."""


async def read_ahead(
    source: AsyncGenerator[_Item, None],
    join: Callable[[list[_Item]], _Item],
    on_empty: Callable[[], None] = do_nothing,
    only_whole: bool = False,
) -> AsyncGenerator[_Item, None]:
    """Yield all that has come of `source` since the last time, joined to one item.

    `on_empty` is called whenever all that came was yielded and dealt with. `only_whole`: yield all
    together, at the end. Raises what the source raises.
    """
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
            if not items or (only_whole and not task.done()):
                on_empty()
                has_come.clear()
                await has_come.wait()
                continue
            item, items[:] = join(items), []
            yield item
        await task  # for what it may have raised
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
