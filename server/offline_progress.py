"""How far `srm batch` is: a bar on a terminal, or lines in a log. Knows only numbers."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

log = logging.getLogger(__name__)

_BAR_S = 0.25
_LOG_S = 10.0
_WINDOW_S = 30.0
"""Over which rates are taken."""


class Level(NamedTuple):
    """How far it is."""

    done: int
    """Lines with a result, of earlier runs too."""
    tokens: int
    """Sampled in this run."""
    running: int
    """Sequences that the engine runs."""


class Meter:
    """Rates of the last seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: deque[tuple[float, Level]] = deque()

    def describe(self, level: Level, total: int | None) -> str:
        """Lines of how many, tokens a second, how long it will take."""
        now = self._clock()
        self._seen.append((now, level))
        while now - self._seen[0][0] > _WINDOW_S:
            self._seen.popleft()
        then, first = self._seen[0]
        seconds = max(now - then, 1e-9)
        lines_per_s = (level.done - first.done) / seconds
        tokens_per_s = (level.tokens - first.tokens) / seconds if now > then else 0.0
        of = f" of {total:,}" if total is not None else ""
        left = ""
        if total is not None and lines_per_s > 0 and level.done < total:
            left = f", {timedelta(seconds=round((total - level.done) / lines_per_s))} left"
        return (
            f"{level.done:,}{of} lines, {tokens_per_s:,.0f} tok/s, "
            f"{level.running:,} sequences running{left}"
        )


async def show_progress(level: Callable[[], Level], total: Callable[[], int | None]) -> None:
    """Say how far it is, until cancelled."""
    meter = Meter()
    meter.describe(level(), None)  # what rates are taken from
    if not sys.stderr.isatty():
        while True:
            await asyncio.sleep(_LOG_S)
            log.info("%s", meter.describe(level(), total()))
    columns = (BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("", total=None)
        try:
            while True:
                progress.update(
                    bar,
                    total=total(),
                    completed=level().done,
                    description=meter.describe(level(), total()),
                )
                await asyncio.sleep(_BAR_S)
        finally:
            progress.update(bar, total=total(), completed=level().done)
