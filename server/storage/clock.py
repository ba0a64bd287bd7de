"""The clock by which batches and files expire, unaffected by jumps of the wall clock.

It goes by the machine's uptime, which nobody sets, and follows the wall clock where that goes back
or runs a little fast. A jump ahead is ignored for a day, so that somebody can set it right. The
state is kept in a file, for the next process.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from srm.files import read_file

log = logging.getLogger(__name__)

HOLD_S = 24 * 3600.0
"""Seconds after which a jump is taken for the truth."""
_JUMP_S = 60.0
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def _uptime() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class _Kept(msgspec.Struct):
    boot: str
    """Id of the boot; uptimes of another boot say nothing."""
    offset: Annotated[float, Meta(ge=0, lt=2.0**40)]
    """Wall clock minus uptime in seconds, jumps left out."""
    held_at: float | None
    """Uptime in seconds at the jump that is left out; None without one."""


class Clock:
    """The clock of one process."""

    def __init__(
        self,
        file: Path,
        wall: Callable[[], float] = time.time,
        uptime: Callable[[], float] = _uptime,
        boot: str = "",
    ) -> None:
        """`file` need not exist. `wall` and `uptime` return seconds; `boot` is unique to a boot."""
        self._file = file
        self._wall = wall
        self._uptime = uptime
        self._boot = boot or _BOOT_ID.read_text().strip()
        self._kept = self._read()

    def now(self) -> float:
        """Return the time in Unix seconds."""
        lasting, uptime = self._kept, self._uptime()
        offset = self._wall() - uptime
        has_lasted = lasting.held_at is not None and uptime - lasting.held_at >= HOLD_S
        if offset <= lasting.offset + _JUMP_S or has_lasted:
            lasting.offset, lasting.held_at = offset, None
        elif lasting.held_at is None:
            lasting.held_at = uptime
            log.warning(
                "the clock is %.0f s ahead of where it should be: nothing expires by that for %g h",
                *(offset - lasting.offset, HOLD_S / 3600),
            )
        return uptime + lasting.offset

    def keep(self) -> None:
        """Save the state for the next process."""
        made = self._file.with_suffix(f".{os.getpid()}.making")
        try:
            made.write_bytes(msgspec.json.encode(self._kept))
            made.rename(self._file)
        except OSError as error:
            with suppress(OSError):  # its folder may be none
                made.unlink(missing_ok=True)
            log.warning("%s cannot be written: %s", self._file, error.strerror)

    def _read(self) -> _Kept:
        uptime = self._uptime()
        try:
            decoded = msgspec.json.decode(read_file(self._file), type=_Kept)
        except (OSError, ValueError):
            decoded = None
        if decoded is None or decoded.boot != self._boot:
            return _Kept(self._boot, self._wall() - uptime, None)
        if decoded.held_at is not None:
            decoded.held_at = min(decoded.held_at, uptime)
        return decoded
