"""Decides when lines may be sent to the engine, and which of them may be what kills it.

An engine that is away is waited for. A line that was in flight at several deaths of the engine in a
row is tried alone, once nothing else of ours is in flight, so that it takes no others along. If the
engine dies of it again and again, and lives for as long without it, the line is to blame; if not,
it may be requests that are not ours.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from itertools import count
from typing import TypeVar

from srm.engine.client.client import EngineClient
from srm.errors import EngineUnavailable, IdInUse, Overloaded, SRMError, StepFailed
from srm.server import metrics
from srm.server.errors import NotFinite

log = logging.getLogger(__name__)

MAX_DEATHS = 5
"""Engine deaths in a row with a line in flight after which the line is tried alone."""
MAX_ALONE = 3
"""Engine deaths with the line tried alone after which the death is its result."""
MAX_BREAKS = 5
"""Non-finite results of a line after which NotFinite is its result."""
_POLL_S = 0.05
_LONGEST_PAUSE_S = 5.0
_SHORTEST_WATCH_S, _LONGEST_WATCH_S = 1.0, 30.0
"""Bounds in seconds on how long the engine must survive without the suspected line."""

Result = TypeVar("Result")


class _Died(Exception):
    """The engine died while it ran the request."""

    def __init__(self, number: int, error: SRMError) -> None:
        super().__init__(number)
        self.number = number
        """The engine deaths that the client has counted, this one included."""
        self.error = error


class _Cleared(Exception):
    """The engine also dies without the suspected request."""


class EngineRetry:
    """Sends a process's batch requests to the engine, and sends them again where needed."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._num_sent = 0
        self._suspects = 0
        self._may_send = asyncio.Event()
        self._may_send.set()
        self._is_quiet = asyncio.Event()
        self._is_quiet.set()
        self._alone = asyncio.Lock()
        self._looks = asyncio.Lock()

    @property
    def is_ready(self) -> bool:
        """Whether the engine takes requests now."""
        status = self._client.status
        return status is not None and status.state == "ready"

    async def until_answered(self, ask: Callable[[], Awaitable[Result]]) -> Result:
        """Ask until there is an answer, however often the engine goes away meanwhile.

        Raises NotFinite if the output is not finite MAX_BREAKS times, and StepFailed or
        EngineUnavailable if the request kills the engine.
        """
        breaks = deaths = last = 0
        while True:
            try:
                if deaths < MAX_DEATHS:
                    return await self._ask(ask)
                log.warning("in flight at %d deaths of the engine: tried alone", deaths)
                return await self._ask_alone(ask)
            except _Died as death:
                if deaths >= MAX_DEATHS:
                    raise death.error from None
                deaths += death.number != last
                last = death.number
            except _Cleared:
                deaths = 0
            except NotFinite:
                breaks += 1
                if breaks == MAX_BREAKS:
                    raise
            except EngineUnavailable:  # it drains, or is not there any more
                pass
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
            return await self._send(ask)
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
                return await self._tried(ask)
        finally:
            self._suspects -= 1
            if not self._suspects:
                self._may_send.set()

    async def _tried(self, ask: Callable[[], Awaitable[Result]]) -> Result:
        """Send a request alone, at most MAX_ALONE times.

        Raises _Died if the engine dies each time, and _Cleared if it also dies without the request.
        """
        for turn in count(1):
            await self._until_ready()
            began = time.monotonic()
            try:
                return await self._send(ask)
            except _Died as death:
                while self._client.losses < death.number:
                    await asyncio.sleep(_POLL_S)
                await self._until_ready()
                took = time.monotonic() - began
                await self._watch(min(max(took, _SHORTEST_WATCH_S), _LONGEST_WATCH_S))
                if self._client.losses > death.number:
                    raise _Cleared from None
                if turn == MAX_ALONE:
                    raise
        raise AssertionError

    async def _watch(self, seconds: float) -> None:
        """Let the engine run with nothing of ours in flight."""
        await asyncio.sleep(seconds)

    async def _send(self, ask: Callable[[], Awaitable[Result]]) -> Result:
        before = self._client.losses
        try:
            return await ask()
        except NotFinite:
            raise
        except StepFailed as error:  # the engine's last words
            raise _Died(before + 1, error) from None
        except EngineUnavailable as error:
            if self._client.is_closed:
                await asyncio.Event().wait()  # we are leaving: it is no answer, and none is made
            if self._client.losses > before:
                raise _Died(self._client.losses, error) from None
            raise

    async def _until_ready(self) -> None:
        """Wait until the engine is ready; only one waiter polls at a time."""
        async with self._looks:
            while not self.is_ready:
                await asyncio.sleep(_POLL_S)
