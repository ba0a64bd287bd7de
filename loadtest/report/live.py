"""Live progress of a run: a table on a terminal, a line every few seconds elsewhere.

All of it goes to standard error. Knows only counts.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.table import Table

from srm.loadtest.client.server_metrics import MetricsSampler, running
from srm.loadtest.client.workers import RunProgress

_LINE_S = 5.0
"""Seconds between two lines, without a terminal."""
_WINDOW_S = 5.0
"""Seconds over which the current token rate is taken."""

OnProgress = Callable[[RunProgress], None]


class LiveMeter:
    """Turns successive progress reports into rows to show."""

    def __init__(self, running: Callable[[], float | None]) -> None:
        """`running` returns how many sequences the server runs now, if it says."""
        self._running = running
        self._seen: deque[tuple[float, int]] = deque([(0.0, 0)])

    def rows(self, progress: RunProgress) -> list[tuple[str, str]]:
        """Return pairs of label and value."""
        self._seen.append((progress.seconds, progress.output_tokens))
        while len(self._seen) > 2 and progress.seconds - self._seen[0][0] > _WINDOW_S:
            self._seen.popleft()
        then, before = self._seen[0]
        tokens = progress.output_tokens
        now = (tokens - before) / max(progress.seconds - then, 1e-9)
        mean = tokens / max(progress.seconds, 1e-9)
        kinds = ("planned", "sent", "in_flight", "completed", "failed")
        counts = [f"{getattr(progress, kind):,} {kind.replace('_', ' ')}" for kind in kinds]
        rows = [
            ("elapsed", f"{progress.seconds:.0f} s"),
            ("requests", ", ".join(counts)),
            ("output tokens", f"{now:,.0f}/s now, {mean:,.0f}/s mean"),
        ]
        if not math.isnan(progress.first_byte_p50):
            p50, p99 = progress.first_byte_p50, progress.first_byte_p99
            rows.append(("first byte", f"p50 {p50 * 1e3:,.0f} ms, p99 {p99 * 1e3:,.0f} ms"))
        late, busy = progress.lateness_s, progress.cpu_share
        rows.append(("harness", f"{late * 1e3:,.1f} ms late, {busy:.0%} of a core"))
        sequences = self._running()
        if sequences is not None:
            rows.append(("server", f"{sequences:,.0f} sequences running"))
        if progress.last_error:
            rows.append(("last error", progress.last_error))
        return rows


@contextmanager
def shown(title: str, sampling: MetricsSampler) -> Iterator[OnProgress]:
    """Yield the callback that shows the progress of the run with this title."""
    meter = LiveMeter(lambda: running(sampling.latest))
    console = Console(stderr=True)
    if console.is_terminal:
        with Live(console=console, refresh_per_second=4, transient=True) as live:
            yield lambda progress: live.update(_table(title, meter.rows(progress)))
    else:
        yield _lines(title, meter)


def _table(title: str, rows: list[tuple[str, str]]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False)
    for name, value in rows:
        table.add_row(name, value)
    return table


def _lines(title: str, meter: LiveMeter) -> OnProgress:
    reported = -_LINE_S

    def tell(progress: RunProgress) -> None:
        nonlocal reported
        rows = meter.rows(progress)
        if progress.seconds - reported >= _LINE_S:
            reported = progress.seconds
            sys.stderr.write(f"{title}: {'; '.join(f'{name} {value}' for name, value in rows)}\n")

    return tell
