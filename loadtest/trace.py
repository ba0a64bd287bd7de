"""Traces: arrival times and lengths of past requests, read from a file.

Reads three formats, recognized by the file's content; knows nothing of what is done with them.

- JSONL with `timestamp` in seconds, and perhaps `prompt_tokens`, `output_tokens`, `n`, `hash_ids`.
- JSONL as Mooncake published it: `timestamp` in milliseconds, `input_length`, `output_length` and
  `hash_ids`, one for each 512 tokens of the prompt: equal ids are equal tokens.
- CSV as Azure published it: `TIMESTAMP` (a date and time), `ContextTokens`, `GeneratedTokens`.
"""

from __future__ import annotations

import csv
import re
from datetime import UTC, datetime
from operator import attrgetter
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from srm.errors import cut
from srm.loadtest import lines

BLOCK_TOKENS = 512
"""Prompt tokens that one of Mooncake's `hash_ids` stands for."""
_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_Length = Annotated[int, Meta(ge=1, le=2**31 - 1)]
_Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
_Time = Annotated[float, Meta(ge=-1e12, le=1e12)]


class Arrival(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One request of a trace. What the trace does not give is None, or no blocks."""

    timestamp: _Time
    """Seconds since an arbitrary time."""
    prompt_tokens: _Length | None = None
    output_tokens: _Length | None = None
    n: _Length | None = None
    blocks: tuple[int, ...] = msgspec.field(default=(), name="hash_ids")
    """Ids of the blocks of BLOCK_TOKENS tokens that the prompt begins with."""


class _Mooncake(msgspec.Struct, forbid_unknown_fields=True):
    timestamp: _Time
    input_length: _Count
    output_length: _Count
    hash_ids: tuple[_Count, ...] = ()


def read(path: Path) -> list[Arrival]:
    """Return the requests sorted by time, ties in the file's order. Raises ConfigError."""
    if path.suffix.lower() == ".csv":
        requests = _azure(path)
    elif '"input_length"' in lines.text_of(path).lstrip().partition("\n")[0]:
        allowed = "timestamp (milliseconds), input_length, output_length and perhaps hash_ids"
        requests = [
            Arrival(
                line.timestamp / 1000,
                max(1, line.input_length),
                max(1, line.output_length),
                blocks=line.hash_ids,
            )
            for _, line in lines.read(path, _Mooncake, allowed)
        ]
    else:
        allowed = "timestamp (seconds) and perhaps prompt_tokens, output_tokens, n, hash_ids"
        requests = [line for _, line in lines.read(path, Arrival, allowed)]
    return sorted(requests, key=attrgetter("timestamp"))


def _azure(path: Path) -> list[Arrival]:
    allowed = f"a header {','.join(_AZURE)}, then a date and time and two whole numbers"
    rows = csv.reader(lines.text_of(path).splitlines(), skipinitialspace=True)
    requests = []
    try:
        head = [name.strip() for name in next(rows, [])]
        if tuple(head) != _AZURE:
            raise lines.bad_line(path, 1, f"got {cut(str(head), 200)}", allowed)
        for row in rows:
            if row:  # else the line is empty
                requests.append(_row(row))
    except (csv.Error, ValueError) as error:
        raise lines.bad_line(path, rows.line_num, cut(str(error), 200), allowed) from None
    if not requests:
        raise lines.bad_line(path, 2, "no line", allowed)
    return requests


def _row(row: list[str]) -> Arrival:
    """Raises ValueError."""
    if len(row) != len(_AZURE):
        raise ValueError(f"got {len(row)} fields: {row}")
    when = datetime.fromisoformat(row[0].strip())
    seconds = (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()
    fed, sampled = map(_length, row[1:])
    return Arrival(seconds, max(1, fed), max(1, sampled))


def _length(text: str) -> int:
    if not re.fullmatch(r"\s*\d{1,10}(\.0*)?\s*", text) or (value := int(float(text))) >= 2**31:
        raise ValueError(f"a length must be a whole number from 0 to {2**31 - 1}; got {text!r}")
    return value
