"""Progress of long work, on standard error: a bar on a terminal, else a line every 30
seconds and one at the end."""

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
    level, latest = done, ""

    def say(*left: str) -> None:
        part = [f"{level / total:.0%}"] if total else []
        sys.stderr.write(f"{doing}: {', '.join([*part, latest, *left])}\n")

    def tell(now: int, note: str) -> None:
        nonlocal last, level, latest
        level, latest = now, note
        if is_shown and (at := clock()) - last >= LINE_S:
            last, made = at, now - done
            rest = (total - now) * (at - begun) / made if total and made > 0 else None
            say(*([] if rest is None else [f"{timedelta(seconds=round(rest))} left"]))

    try:
        yield tell
    finally:
        if is_shown and latest:
            say()
