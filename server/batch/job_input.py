"""Checks an input file before any of its lines is run.

Takes one pass, and a second one if custom_ids seem to repeat; uses 8 bytes of memory a line. The
contents of bodies are not checked: a line that cannot be answered has its error in the error file.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from server.batch.lines import BatchLine, RawLine, parse_line, read_lines
from server.storage.records import LineError

MAX_ERRORS: Final = 100
"""Most errors reported for one file."""
_MAX_DOUBTS = 10_000
"""Most custom_id hashes that the second pass checks as possible duplicates."""


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
    elif doubtful := _repeated(hashes):
        lines = _lines(path, max_line_bytes, is_stopped)
        errors = checked.errors + _duplicates(lines, endpoint, doubtful)
        checked.errors = sorted(errors, key=lambda error: error.line or 0)[:MAX_ERRORS]
    return checked


def _lines(path: Path, max_line_bytes: int, is_stopped: Callable[[], bool]) -> Iterator[RawLine]:
    with path.open("rb") as file:
        for lines in read_lines(file, max_line_bytes):
            if is_stopped():
                raise Stopped
            yield from lines


def _repeated(hashes: array[int]) -> set[int]:
    """Return the hashes that occur more than once, at most _MAX_DOUBTS of them."""
    values = np.frombuffer(hashes, np.int64)
    values.sort()  # in place, since there may be a hundred million
    return set(values[1:][values[1:] == values[:-1]][:_MAX_DOUBTS].tolist())


def _duplicates(lines: Iterator[RawLine], endpoint: str, doubtful: set[int]) -> list[LineError]:
    """Return errors for lines with these hashes whose custom_id an earlier line has, at most
    MAX_ERRORS."""
    first: dict[str, int] = {}
    errors: list[LineError] = []
    for number, raw in lines:
        line = parse_line(raw, number, endpoint)
        if isinstance(line, LineError) or hash(line.custom_id) not in doubtful:
            continue
        if line.custom_id in first:
            message = f"custom_id {line.custom_id!r} is that of line {first[line.custom_id]} too"
            errors.append(
                LineError(
                    code="duplicate_custom_id", message=message, line=number, param="custom_id"
                )
            )
            if len(errors) == MAX_ERRORS:
                break
        else:
            first[line.custom_id] = number
    return errors
