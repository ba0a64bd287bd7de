"""The log of a run: its values by update and texts of its model, as JSON lines beside it.

A run that goes on drops the lines of updates that it makes again, and those that were cut off or
damaged: nothing depends on them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from srm.errors import UNDECODABLE, ConfigError
from srm.files import open_file
from srm.training.instruments.events import Events
from srm.training.instruments.page import write_page
from srm.training.instruments.record import LogLine, Sample
from srm.training.text.whole_files import write_whole

log = logging.getLogger(__name__)

LOG, PAGE = "log.jsonl", "curves.html"
_LEAST_S = 10.0
"""Seconds between two pages."""
_MOST_SHARE = 0.02
"""Largest share of the time that pages take."""


class RunLog:
    """Writes `log.jsonl` and `curves.html` into a folder, and the values to `events` too."""

    def __init__(self, folder: Path, done: int, events: Sequence[Events] = ()) -> None:
        """Go on after `done` updates; without any, nothing says whose lines there are."""
        self._folder, self._line, self._due = folder, LogLine(done), 0.0
        self._events = [*events]
        retained = [line for line in read_log(folder / LOG) if line.step <= (done or -1)]
        write_whole(folder / LOG, b"".join(msgspec.json.encode(line) + b"\n" for line in retained))

    def tell(self, step: int, name: str, value: float) -> None:
        """Write a value after so many updates. Raises ConfigError if the disk takes no more."""
        if step != self._line.step:
            self._write()
            self._line = LogLine(step)
        self._line.values[name] = value
        self._send("add_scalar", name, value, step)

    def show(self, step: int, sample: Sample) -> None:
        """Write a text of the model after so many updates."""
        self._append(LogLine(step, sample=sample))

    def flush(self, is_last: bool = False) -> None:
        """Write what is not written yet, and the page if it is due or the run ends."""
        self._write()
        self._send("flush")
        if is_last or time.monotonic() >= self._due:
            self._write_page()

    def _send(self, method: str, *values: Any) -> None:
        """Call a method of each of `events`; one that fails is told and left out."""
        for events in [*self._events]:
            try:
                getattr(events, method)(*values)
            except Exception as error:  # noqa: BLE001 - foreign code with a network
                log.warning("%s gets no more values: %r", type(events).__name__, error)
                self._events.remove(events)

    def _write(self) -> None:
        if self._line.values:
            self._append(self._line)
            self._line = LogLine(self._line.step)
            if time.monotonic() >= self._due:
                self._write_page()

    def _write_page(self) -> None:
        began = time.monotonic()
        write_page(self._folder.name, list(read_log(self._folder / LOG)), self._folder / PAGE)
        ended = time.monotonic()
        self._due = ended + max(_LEAST_S, (ended - began) / _MOST_SHARE)

    def _append(self, line: LogLine) -> None:
        path, content = self._folder / LOG, msgspec.json.encode(line) + b"\n"
        try:
            with path.open("ab", buffering=0) as file:
                whole = file.write(content) == len(content)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
        if not whole:
            raise ConfigError(f"{path} cannot be written, is the disk full?")


def read_log(path: Path) -> Iterator[LogLine]:
    """Yield the lines of a log that can be read; none where there is no log."""
    if not path.exists():
        return
    with open_file(path) as file:
        for line in file:
            try:
                yield msgspec.json.decode(line, type=LogLine)
            except UNDECODABLE:
                continue
