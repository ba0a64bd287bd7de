"""Shows whoever started a process that its event loop turns.

A loop that is held up by one long piece of work does not turn, nor does that of a process that is
frozen: the supervisor ends either after LOOP_TIMEOUT_S. What the process was in the middle of then
stands in the log, since every process writes its stacks on SIGUSR1.
"""

from __future__ import annotations

import asyncio
from functools import partial

from srm.engine.process.watchdog import REARM_S, Heartbeat
from srm.tasks import dispensable

LOOP_TIMEOUT_S = 60.0
"""Seconds without a turn of its event loop after which a process is ended and started again."""


async def show_turns(fd: int) -> None:
    """Beat in the memory of this file in the loop's turns, until cancelled; if -1, do nothing."""
    if fd >= 0:
        await dispensable(partial(_beat, fd), "the heartbeat")


async def _beat(fd: int) -> None:
    heartbeat = Heartbeat(fd)
    while True:
        heartbeat.beat(0)
        await asyncio.sleep(REARM_S)
