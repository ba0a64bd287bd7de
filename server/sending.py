"""Sending: when lines may be sent to the engine, and which of them may be what kills it.

An engine that is away is waited for. A line that was in flight at several deaths of the engine in a
row is tried alone, once nothing else of ours is in flight, so that it takes no others along; if the
engine dies of it again, it is the line. Knows no lines and no requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from engine.client import EngineClient
from engine.errors import EngineUnavailable, IdInUse, Overloaded, StepFailed
from server import metrics

log = logging.getLogger(__name__)

MAX_DEATHS = 5
"""Of the engine in a row with a line in flight, after which it is tried alone."""
MAX_BREAKS = 5
"""Results of a line that were no numbers, after which that is its result."""
_POLL_S = 0.05
_LONGEST_PAUSE_S = 5.0

Result = TypeVar("Result")


class Sending:
    """All that one process sends to the engine besides what people wait for."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._num_sent = 0
        self._suspects = 0
        self._may_send = asyncio.Event()
        self._may_send.set()
        self._is_quiet = asyncio.Event()
        self._is_quiet.set()
        self._alone = asyncio.Lock()
        self._poller: asyncio.Task[None] | None = None

    @property
    def is_ready(self) -> bool:
        """Whether the engine takes requests now."""
        status = self._client.status
        return status is not None and status.state == "ready"

    async def until_answered(self, ask: Callable[[], Awaitable[Result]]) -> Result:
        """Ask until there is an answer, and however often the engine goes away meanwhile.

        Raises StepFailed if what is asked breaks the model every time, and EngineUnavailable if
        the engine dies of it.
        """
        deaths = breaks = 0
        while True:
            is_suspect = deaths >= MAX_DEATHS
            try:
                if is_suspect:
                    log.warning("in flight at %d deaths of the engine: tried alone", deaths)
                    return await self._ask_alone(ask)
                return await self._ask(ask)
            except EngineUnavailable:
                # An engine that drains refuses and is there; one that died is not.
                if self._client.status is None:
                    deaths += 1
                if is_suspect and deaths > MAX_DEATHS:
                    raise
            except StepFailed:
                breaks += 1
                if breaks == MAX_BREAKS:
                    raise
            except Overloaded as error:
                await asyncio.sleep(min(error.retry_after_s, _LONGEST_PAUSE_S))
            except IdInUse:
                await asyncio.sleep(_POLL_S)
            metrics.BATCH_RETRIES.inc()

    async def _ask(self, ask: Callable[[], Awaitable[Result]]) -> Result:
        while not (self.is_ready and self._may_send.is_set()):
            await self._may_send.wait()
            await self._until_ready()
        self._num_sent += 1
        self._is_quiet.clear()
        try:
            return await ask()
        finally:
            self._num_sent -= 1
            if not self._num_sent:
                self._is_quiet.set()

    async def _ask_alone(self, ask: Callable[[], Awaitable[Result]]) -> Result:
        self._suspects += 1
        self._may_send.clear()
        try:
            async with self._alone:
                await self._is_quiet.wait()
                await self._until_ready()
                return await ask()
        finally:
            self._suspects -= 1
            if not self._suspects:
                self._may_send.set()

    async def _until_ready(self) -> None:
        """However many wait, one looks."""
        if not self.is_ready:
            if self._poller is None or self._poller.done():
                self._poller = asyncio.create_task(self._poll())
            await asyncio.shield(self._poller)

    async def _poll(self) -> None:
        while not self.is_ready:
            await asyncio.sleep(_POLL_S)
