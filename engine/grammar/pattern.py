"""Regexes in schemas: what llguidance reads otherwise than JSON Schema, and formats as regexes."""

from __future__ import annotations

import re
from collections.abc import Callable

from srm.engine.errors import InvalidRequest

MAX_PATTERN = 5_000
"""Most characters of a pattern."""
_YEAR = r"(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LEAP_YEAR = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = rf"^(?:{_YEAR}-(?:0[13-9]|1[0-2])-..|{_YEAR}-02-(?:[01].|2[0-8])|{_LEAP_YEAR}-02-29)"
FORMATS = {
    "date-time": _DATE + "[Tt]..:..:[0-5]",
    "date": _DATE,
    "time": "^..:..:[0-5]",
    "duration": "",
    "email": "",
    "hostname": "^.{1,253}$",
    "ipv4": "",
    "ipv6": "",
    "uuid": "",
    "uri": "",
}
"""Formats, each with a pattern for what llguidance does not ask of it: days that are in the
calendar, no leap seconds, whose days nobody knows ahead, and the length of a name."""
_CLASS = re.compile(r"\\.|\[\^?\]?(?P<inside>(?:\\.|[^\]\\])*)\]", re.DOTALL)
_SET = re.compile(r"(?<!\\)(?:\[|&&|--|~~)")
"""What Rust reads as sets of sets, and JavaScript as characters."""


def check_pattern(pattern: str, fault: Callable[[str], InvalidRequest]) -> None:
    """Raise `fault(what)` for a pattern that would be read otherwise than it is meant."""
    if len(pattern) > MAX_PATTERN:
        raise fault(f"the pattern has {len(pattern)} characters; at most {MAX_PATTERN} are taken")
    if not pattern.isascii() and any("\ud800" <= char <= "\udfff" for char in pattern):
        raise fault("it has half of a surrogate pair, which is no text")
    for part in _CLASS.finditer(pattern):
        if (inside := part["inside"]) and _SET.search(inside):
            raise fault(f"write \\[, \\&, \\- and \\~ within [ ]; got {part[0]!r:.80}")
    if "{," in re.sub(r"\\.", "", pattern):
        raise fault("write {0,n} for {,n}")
