"""Tasks: those that end with their block, those that a process cannot live without, and those that
it can. docs/processes.md has a row for each long-lived one."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from srm.errors import CheckpointError, ConfigError, SRMError

logger = logging.getLogger(__name__)

AGAIN_AFTER_S = 10.0
"""Seconds until work that failed is begun again."""

Result = TypeVar("Result")
Fail = Callable[[str, Exception], None]
"""Called with what failed, and how."""


def end_process(name: str, error: Exception) -> None:
    """Say what failed, and end the process at once: whoever started it starts it again.

    Nothing is waited for, since what would be may never come.
    """
    if isinstance(error, ConfigError | CheckpointError):
        logger.critical("%s failed: %s", name, error.message)
    else:
        logger.critical(
            "%s failed, which nothing here works without: this process ends", name, exc_info=error
        )
    logging.shutdown()
    os._exit(error.exit_code if isinstance(error, SRMError) else 1)


async def vital(
    begin: Callable[[], Awaitable[Result]], name: str, fail: Fail = end_process
) -> Result:
    """Do work that the process cannot live without: if it raises, the process ends."""
    try:
        return await begin()
    except Exception as error:
        fail(name, error)
        raise


async def dispensable(begin: Callable[[], Coroutine[Any, Any, object]], name: str) -> None:
    """Do work that the process can live without: if it raises, that is logged, and it is begun
    again."""
    while True:
        work = asyncio.create_task(begin(), name=name)
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)  # it may fail even then
            raise
        if (error := work.exception()) is None:
            return
        logger.error("%s failed: begun again in %g s", name, AGAIN_AFTER_S, exc_info=error)
        await asyncio.sleep(AGAIN_AFTER_S)


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
        tasks = [group.create_task(coroutine) for coroutine in work]
        yield
        for task in tasks:
            task.cancel()
