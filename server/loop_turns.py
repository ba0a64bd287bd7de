"""Shows whoever started a process that its event loop turns.

A loop that is held up by one long piece of work does not turn, nor does that of a process that is
frozen: the supervisor ends either after LOOP_TIMEOUT_S. What the process was in the middle of then
stands in the log, since every process writes its stacks on SIGUSR1.
"""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

from srm.engine.process.watchdog import REARM_S, Heartbeat
from srm.tasks import dispensable

LOOP_TIMEOUT_S = 60.0
"""Seconds without a turn of its event loop after which a process is ended and started again."""


async def show_turns(path: str) -> None:
    """Touch the file of this path in the loop's turns, until cancelled; if empty, do nothing."""
    if path:
        await dispensable(partial(_touch, Path(path)), "the heartbeat")


async def _touch(path: Path) -> None:
    heartbeat = Heartbeat(path)
    while True:
        heartbeat.beat(0)
        await asyncio.sleep(REARM_S)
