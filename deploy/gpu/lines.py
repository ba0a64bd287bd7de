"""The lines of results of a call, which break off where a machine vanishes or its disk is full."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, BinaryIO

BROKE_OFF = "the call broke off"
"""Said of a size that was begun and never ended; the next call tries it once more."""

AGAIN = " again: "
"""Between a part's name and a size: lines of that size in MAX's synchronous mode."""


def parse_lines(content: bytes) -> tuple[list[dict[str, Any]], int]:
    """Return the lines, and how many are damaged."""
    lines, damaged = [], 0
    for text in filter(None, content.splitlines()):
        try:
            line = json.loads(text)
        except ValueError:
            damaged += 1
            continue
        if isinstance(line, dict) and "part" in line and "key" in line:
            lines.append(line)
        else:
            damaged += 1
    return lines, damaged


def drop_retried(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the lines but those that broke off and have a later result."""
    last = {(line.get("part"), line["key"]): line for line in lines}
    return [
        line
        for line in lines
        if line.get("died") != BROKE_OFF or line is last[line.get("part"), line["key"]]
    ]


def open_lines(path: Path) -> BinaryIO:
    """Open it to append whole lines: what broke off gets an end of its own."""
    file = path.open("ab+")
    if file.tell() and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n":
        file.write(b"\n")
        file.flush()
    return file
