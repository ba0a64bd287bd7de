"""Stopping an API process: it says so, takes nothing new, and lets what runs finish.

Connections are taken until the end, so that clients are told where to go rather than refused by the
machine: 503 with `Retry-After`, and `/ready` says why.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from types import FrameType

import uvicorn

log = logging.getLogger(__name__)

READING = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods that start no work and are answered to the end: metrics above all."""


def _is_no_stop(record: logging.LogRecord) -> bool:
    """Filter out uvicorn's error about a graceful shutdown that timed out: that was asked for."""
    return "timeout graceful shutdown exceeded" not in str(record.msg)


class Draining:
    """Whether this process is being stopped."""

    is_on = False

    def __init__(self) -> None:
        self.tasks: set[asyncio.Task[None]] = set()
        """Running requests. A stop waits for them."""


class DrainingServer(uvicorn.Server):
    """A server that ends, once told to, when nothing runs any more, or after `drain_s`."""

    def __init__(
        self,
        config: uvicorn.Config,
        draining: Draining,
        drain_s: float,
        leave: Callable[[], None],
    ) -> None:
        """`leave` is called several times a second while it drains: so what runs can end."""
        super().__init__(config)
        logging.getLogger("uvicorn.error").addFilter(_is_no_stop)
        self._draining = draining
        draining.tasks = self.server_state.tasks
        self._drain_s = drain_s
        self._leave = leave
        self._deadline: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002  # uvicorn's
        """Begin to drain, or end at once. A stop that was asked for is no failure: exit 0."""
        if self._deadline is None:
            self._draining.is_on = True
            self._deadline = time.monotonic() + self._drain_s
            if running := len(self.server_state.tasks):
                log.info("stopping: %d requests run, for %g s at most", running, self._drain_s)
        else:
            self._deadline = time.monotonic()

    async def on_tick(self, counter: int) -> bool:
        """Return whether to end; called several times a second."""
        is_over = await super().on_tick(counter)
        if self._deadline is None:
            return is_over
        self._leave()
        left = max(0.0, self._deadline - time.monotonic())
        # Connections that still have replies to take may use the remaining time.
        self.config.timeout_graceful_shutdown = left  # type: ignore[assignment]  # waits for floats too
        if left == 0 and (running := len(self.server_state.tasks)):
            log.warning("stopping: %d requests are broken off", running)
        return is_over or not self.server_state.tasks or left == 0
