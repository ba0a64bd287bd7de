"""Pausing: between two steps all sequences stand still in their slots, until somebody resumes them.

A pause has a lease: who asked for it may be gone, and then what runs goes on. It is of all engines
of a server, in memory that they share, and so of those that are started again meanwhile.
"""

from __future__ import annotations

import logging
import mmap
import os
import time

from srm.engine.messages import Done, Pause, Resume

logger = logging.getLogger(__name__)

# Places in the memory; times are of time.monotonic, which is the same in all processes.
# _PAUSED_AT is 0 where steps are made.
_PAUSED_AT, _LEASE_S, _ENDS_AT, _REFEEDS, _WAITS = range(5)
_BYTES = 5 * 8


class Pausing:
    """Whether engines make steps."""

    def __init__(self, fd: int = -1) -> None:
        """`fd`: a file of memory that all engines of a server have open; -1: there is no other."""
        if fd >= 0:
            os.ftruncate(fd, _BYTES)  # the first one finds it empty
        self._shared = memoryview(mmap.mmap(fd, _BYTES)).cast("d")
        self._was_paused = False

    @property
    def is_paused(self) -> bool:
        return self._shared[_PAUSED_AT] > 0

    @property
    def refeeds(self) -> bool:
        """Whether it is a pause after which what runs is fed again by weights that are new."""
        return self.is_paused and self._shared[_REFEEDS] > 0

    @property
    def waits(self) -> bool:
        """Whether it is a pause before which what runs is to end."""
        return self.is_paused and self._shared[_WAITS] > 0

    def receive(self, message: Pause | Resume) -> Done:
        """Pause or resume; once more is the same as once, but begins the lease anew."""
        if isinstance(message, Resume):
            return Done(message.id, {"paused_s": round(self._end(), 6)})
        now = time.monotonic()
        self._shared[_LEASE_S] = message.lease_s
        self._shared[_REFEEDS] = message.refeeds or self.refeeds
        self._shared[_WAITS] = message.waits
        self.renew()
        if not self.is_paused:
            self._shared[_PAUSED_AT] = now
            logger.info("paused")
        return Done(message.id, {"paused_s": round(now - self._shared[_PAUSED_AT], 6)})

    def renew(self) -> None:
        """Begin the lease anew: whoever paused is still there."""
        self._shared[_ENDS_AT] = time.monotonic() + self._shared[_LEASE_S]

    def has_changed(self) -> bool:
        """End a pause whose lease is over, and say so. Return whether steps are made where none
        were at the last call, or the other way round, whichever engine was told so."""
        if self.is_paused and time.monotonic() >= self._shared[_ENDS_AT]:
            logger.warning(
                "nobody has resumed what was paused %.0f s ago: it goes on by itself", self._end()
            )
        was_paused, self._was_paused = self._was_paused, self.is_paused
        return was_paused != self._was_paused

    def _end(self) -> float:
        """Let steps be made again; return for how many seconds there were none, 0 if there were."""
        paused_at, self._shared[_PAUSED_AT] = self._shared[_PAUSED_AT], 0
        if not paused_at:
            return 0.0
        paused_s = time.monotonic() - paused_at
        logger.info("resumed after %.3f s", paused_s)
        return paused_s
