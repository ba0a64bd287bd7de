"""Pausing: between two steps all sequences stand still in their slots, until somebody resumes them.

A pause has a lease: who asked for it may be gone, and then what runs goes on.
"""

from __future__ import annotations

import logging
import time

from srm.engine.messages import Done, Pause, Resume

logger = logging.getLogger(__name__)


class Pausing:
    """Whether an engine makes steps."""

    def __init__(self) -> None:
        self._paused_at: float | None = None
        self._lease_s = 0.0
        self._ends_at = 0.0

    @property
    def is_paused(self) -> bool:
        return self._paused_at is not None

    def receive(self, message: Pause | Resume) -> Done:
        """Pause or resume; once more is the same as once, but begins the lease anew."""
        if isinstance(message, Resume):
            return Done(message.id, {"paused_s": round(self.end(), 6)})
        if self._paused_at is None:
            self._paused_at = time.monotonic()
            logger.info("paused")
        self._lease_s = message.lease_s
        self.renew()
        return Done(message.id, {"paused_s": round(time.monotonic() - self._paused_at, 6)})

    def renew(self) -> None:
        """Begin the lease anew: whoever paused is still there."""
        self._ends_at = time.monotonic() + self._lease_s

    def end(self) -> float:
        """Let steps be made again; return for how many seconds there were none, 0 if there were."""
        paused_at, self._paused_at = self._paused_at, None
        if paused_at is None:
            return 0.0
        paused_s = time.monotonic() - paused_at
        logger.info("resumed after %.3f s", paused_s)
        return paused_s

    def check_lease(self) -> bool:
        """End a pause whose lease is over, and say so; return whether that was it."""
        if self._paused_at is None or time.monotonic() < self._ends_at:
            return False
        logger.warning(
            "nobody has resumed what was paused %.0f s ago: it goes on by itself",
            time.monotonic() - self._paused_at,
        )
        self.end()
        return True
