"""Clock: the time by which batches and files expire, which a jump of the wall clock does not reach.

It goes with how long the machine has been up, which nobody sets, and follows the wall clock where
that goes back or runs a little fast. Where it jumps ahead, somebody has a day to set it right. What
is known is kept in a file, for the process that comes next.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

log = logging.getLogger(__name__)

HOLD_S = 24 * 3600.0
"""After so long a jump is taken for the truth."""
_JUMP_S = 60.0
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def _uptime() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class _Kept(msgspec.Struct):
    boot: str
    """Uptimes of another boot say nothing."""
    offset: Annotated[float, Meta(ge=0, lt=2.0**40)]
    """Of the wall clock over the uptime, jumps left out."""
    held_at: float | None
    """Uptime at the jump that is left out."""


class Clock:
    """Of one process."""

    def __init__(
        self,
        file: Path,
        wall: Callable[[], float] = time.time,
        uptime: Callable[[], float] = _uptime,
        boot: str = "",
    ) -> None:
        """`file` need not be there. `wall` and `uptime` are in seconds, `boot` is like no other."""
        self._file = file
        self._wall = wall
        self._uptime = uptime
        self._boot = boot or _BOOT_ID.read_text().strip()
        self._kept = self._read()

    def now(self) -> float:
        """Unix seconds."""
        kept, uptime = self._kept, self._uptime()
        offset = self._wall() - uptime
        has_lasted = kept.held_at is not None and uptime - kept.held_at >= HOLD_S
        if offset <= kept.offset + _JUMP_S or has_lasted:
            kept.offset, kept.held_at = offset, None
        elif kept.held_at is None:
            kept.held_at = uptime
            log.warning(
                "the clock is %.0f s ahead of where it should be: nothing expires by that for %g h",
                *(offset - kept.offset, HOLD_S / 3600),
            )
        return uptime + kept.offset

    def keep(self) -> None:
        """Write down what is known."""
        made = self._file.with_suffix(f".{os.getpid()}.making")
        try:
            made.write_bytes(msgspec.json.encode(self._kept))
            made.rename(self._file)
        except OSError as error:
            made.unlink(missing_ok=True)
            log.warning("%s cannot be written: %s", self._file, error.strerror)

    def _read(self) -> _Kept:
        uptime = self._uptime()
        try:
            kept = msgspec.json.decode(self._file.read_bytes(), type=_Kept)
        except (OSError, ValueError):
            kept = None
        if kept is None or kept.boot != self._boot:
            return _Kept(self._boot, self._wall() - uptime, None)
        if kept.held_at is not None:
            kept.held_at = min(kept.held_at, uptime)
        return kept
