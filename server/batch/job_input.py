"""Checks an input file before any of its lines is run.

Takes one pass, and a second one if custom_ids seem to repeat; uses 8 bytes of memory a line. The
contents of bodies are not checked: a line that cannot be answered has its error in the error file.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Final

import numpy as np

from srm.files import open_file
from srm.server.batch.lines import BatchLine, RawLine, parse_line, read_lines
from srm.server.storage.records import LineError

MAX_ERRORS: Final = 100
"""Most errors reported for one file."""
_MAX_DOUBTS = 10_000
"""Most custom_id hashes that the second pass checks as possible duplicates."""
_MAX_NEW = 65_536
"""Most lines of `FirstLines` that are not yet sorted among the others."""

Parse = Callable[[bytes | None, int], BatchLine | LineError]


class Stopped(Exception):
    """The check was stopped before it had finished."""


@dataclass
class Checked:
    """The result of checking an input file."""

    total: int = 0
    """Lines that are not blank."""
    errors: list[LineError] = field(default_factory=list)
    """Why the file cannot be run; empty if it can."""


def check_input(
    path: Path,
    endpoint: str,
    max_line_bytes: int,
    max_lines: int = 0,
    is_stopped: Callable[[], bool] = lambda: False,
) -> Checked:
    """Check an input file; `max_lines` = 0 means no limit.

    Raises OSError if it cannot be read, and Stopped.
    """
    checked = Checked()
    hashes = array("q")
    for number, raw in _lines(path, max_line_bytes, is_stopped):
        checked.total += 1
        if max_lines and checked.total > max_lines:
            message = f"the file has more than {max_lines} lines, which is max_batch_lines"
            checked.errors = [LineError(code="too_many_tasks", message=message)]
            return checked
        line = parse_line(raw, number, endpoint)
        if isinstance(line, BatchLine):
            hashes.append(hash(line.custom_id))
        elif len(checked.errors) < MAX_ERRORS:
            checked.errors.append(line)
    if not checked.total:
        checked.errors = [LineError(code="empty_file", message="the file has no lines")]
        return checked
    parse = partial(parse_line, endpoint=endpoint)
    twice = duplicates(hashes, lambda: _lines(path, max_line_bytes, is_stopped), parse)
    errors = checked.errors + list(islice(twice, MAX_ERRORS))
    checked.errors = sorted(errors, key=lambda error: error.line or 0)[:MAX_ERRORS]
    return checked


def _lines(path: Path, max_line_bytes: int, is_stopped: Callable[[], bool]) -> Iterator[RawLine]:
    with open_file(path) as file:
        for lines in read_lines(file, max_line_bytes):
            if is_stopped():
                raise Stopped
            yield from lines


def duplicates(
    hashes: array[int], read: Callable[[], Iterable[RawLine]], parse: Parse
) -> Iterator[LineError]:
    """Yield an error for each line whose custom_id an earlier line has. Given the hashes of all
    custom_ids, which it sorts; reads the lines again only if some are equal."""
    values = np.frombuffer(hashes, np.int64)
    values.sort()  # in place, since there may be a hundred million
    doubtful = set(values[1:][values[1:] == values[:-1]][:_MAX_DOUBTS].tolist())
    first: dict[str, int] = {}
    for number, raw in read() if doubtful else ():
        line = parse(raw, number)
        if isinstance(line, LineError) or hash(line.custom_id) not in doubtful:
            continue
        if (earlier := first.setdefault(line.custom_id, number)) != number:
            yield duplicate(line.custom_id, number, earlier)


def duplicate(custom_id: str, line: int, earlier: int) -> LineError:
    """Return the error of a line whose custom_id an earlier line has."""
    message = f"custom_id {custom_id!r} is that of line {earlier} too"
    return LineError(code="duplicate_custom_id", message=message, line=line, param="custom_id")


class FirstLines:
    """The lines that custom_ids came with first, of input that can be read only once.

    Takes 16 bytes a line, and goes by hashes of 64 bits alone: in one of 400,000 inputs of ten
    million lines, two custom_ids that differ are taken for one.
    """

    def __init__(self) -> None:
        self._hashes = np.empty(0, np.int64)  # sorted
        self._lines = np.empty(0, np.int64)
        self._new: dict[int, int] = {}

    def line_of(self, custom_id: str, number: int) -> int:
        """Return the line that it came with first, which is this one if it is new."""
        key = hash(custom_id)
        place = int(self._hashes.searchsorted(np.int64(key)))
        if place < len(self._hashes) and self._hashes[place] == key:
            return int(self._lines[place])
        line = self._new.setdefault(key, number)
        if len(self._new) == _MAX_NEW:
            self._hashes = np.append(self._hashes, np.array(list(self._new), np.int64))
            self._lines = np.append(self._lines, np.array(list(self._new.values()), np.int64))
            order = self._hashes.argsort(kind="stable")
            self._hashes, self._lines = self._hashes[order], self._lines[order]
            self._new.clear()
        return line
