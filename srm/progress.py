"""Progress of long work, on standard error: a bar on a terminal, else a line every 10
seconds and one at the end. What is not measured is counted in seconds."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from math import inf

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from srm.logs import printable

LINE_S = 10.0
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
            speed_estimate_period=inf,  # samples end in bursts, minutes apart
            get_time=clock,
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


@contextmanager
def count_seconds(
    doing: str,
    else_say: Callable[[float], None] | None = None,
    every_s: float = LINE_S,
    clock: Callable[[], float] = time.monotonic,
    wait: Callable[[threading.Event, float], bool] = threading.Event.wait,
) -> Iterator[None]:
    """Show how long this takes: by a line of a terminal that counts and goes at the end; elsewhere
    `else_say`, if there is one, gets the seconds so far every `every_s`."""
    is_terminal = bool(sys.stderr and sys.stderr.isatty())
    if not (is_terminal or else_say):
        yield
        return
    begun, done = clock(), threading.Event()

    def show(text: str) -> None:
        with suppress(OSError):  # the terminal has gone
            sys.stderr.write(f"\r{text}\x1b[K")
            sys.stderr.flush()

    def count() -> None:
        while not wait(done, 1.0 if is_terminal else every_s):
            seconds = clock() - begun
            if is_terminal:  # of one row: what wraps cannot be written over
                room = max(0, shutil.get_terminal_size().columns - 10)
                show(f"{printable(doing)[:room]}: {seconds:.0f} s")
            elif else_say:
                else_say(seconds)

    thread = threading.Thread(target=count, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        if is_terminal:
            show("")
