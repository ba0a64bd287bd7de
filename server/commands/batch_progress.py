"""Progress of `srm batch`: a bar on a terminal, or lines in a log. Knows only numbers.

It is measured in tokens: while the first lines are long, none has ended, and much is done.
"""

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
"""Seconds over which rates are taken."""


class Level(NamedTuple):
    """How far the job is, earlier runs included."""

    done: int
    """Lines with a result."""
    ended: int
    """Tokens of these lines."""
    tokens: int
    """Tokens sampled, also for lines under way."""
    running: int
    """Sequences that the engine runs."""

    def expected(self, total: int | None) -> int | None:
        """Return the tokens of all lines, if those to come are like those that have ended; None if
        unknown."""
        if total is None or not self.done:
            return None
        return max(self.tokens, round(self.ended / self.done * total))


class BatchMeter:
    """Rates of the last seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: deque[tuple[float, int]] = deque()

    def describe(self, level: Level, total: int | None) -> str:
        """Return a text: lines of how many, tokens, tokens a second, the time left."""
        now = self._clock()
        self._seen.append((now, level.tokens))
        while now - self._seen[0][0] > _WINDOW_S:
            self._seen.popleft()
        then, first = self._seen[0]
        per_s = max(0, level.tokens - first) / (now - then) if now > then else 0.0
        of = f" of {total:,}" if total is not None else ""
        expected, left = level.expected(total), ""
        if expected is not None and per_s and level.done != total:
            left = f", {timedelta(seconds=round((expected - level.tokens) / per_s))} left"
        return (
            f"{level.done:,}{of} lines, {level.tokens:,} tokens, {per_s:,.0f} tok/s, "
            f"{level.running:,} sequences running{left}"
        )


async def show_progress(level: Callable[[], Level], total: Callable[[], int | None]) -> None:
    """Show progress until cancelled."""
    meter = BatchMeter()
    meter.describe(level(), None)  # what rates are taken from
    if not sys.stderr.isatty():
        while True:
            await asyncio.sleep(_LOG_S)
            log.info("%s", meter.describe(level(), total()))
    columns = (BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("", total=None)

        def show() -> None:
            now, lines = level(), total()
            progress.update(
                bar,
                total=now.tokens if now.done == lines else now.expected(lines),
                completed=now.tokens,
                description=meter.describe(now, lines),
            )

        try:
            while True:
                show()
                await asyncio.sleep(_BAR_S)
        finally:
            show()
