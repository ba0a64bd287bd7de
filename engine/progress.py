"""Progress of long work, on standard error: a bar on a terminal, else a line every 30 seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

LINE_S = 30.0
Tell = Callable[[int, str], None]
"""Takes how much is done by now, and a note, such as a rate."""


@contextmanager
def show_progress(
    doing: str,
    total: int | None,
    done: int = 0,
    is_shown: bool = True,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Tell]:
    """Yield a function that shows how far the work is. `total` is None where it is not known;
    `done` is what earlier runs did."""
    console = Console(stderr=True)
    if console.is_terminal:
        columns = (BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[note]}"))
        with Progress(
            *(TextColumn("{task.description}"), *columns, TimeRemainingColumn()),
            console=console,
            disable=not is_shown,
        ) as bars:
            bar = bars.add_task(doing, total=total, completed=done, note="")
            yield lambda now, note: bars.update(bar, completed=now, note=note)
        return
    begun = last = clock()

    def tell(now: int, note: str) -> None:
        nonlocal last
        if not is_shown or (at := clock()) - last < LINE_S:
            return
        last, parts = at, [note]
        if total is not None and now > done:
            left = timedelta(seconds=round((total - now) * (at - begun) / (now - done)))
            parts = [f"{now / total:.0%}", note, f"{left} left"]
        sys.stderr.write(f"{doing}: {', '.join(filter(None, parts))}\n")

    yield tell
