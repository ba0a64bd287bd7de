"""Tasks that end with the block they belong to, whatever ends it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any


@asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """Make a TaskGroup that raises the first error itself: callers know errors by their types."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


@asynccontextmanager
async def beside(*work: Coroutine[Any, Any, object]) -> AsyncIterator[None]:
    """Run these while the block runs. One that fails ends the block, and its error is raised."""
    async with task_group() as group:
        tasks = [group.create_task(one) for one in work]
        yield
        for task in tasks:
            task.cancel()
