"""Regular expressions that models write, checked by strings that must and must not match.

RE2 reads them. Its time is linear in the strings, and a pattern is bounded by its length, its
memory and its steps, whoever wrote it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import re2

MAX_LENGTH = 256
"""Most characters of a sample's pattern."""
MAX_STEPS = 2_000_000
"""Most instructions of a sample's pattern x bytes of all strings: 10 ms at worst."""
_MAX_MEMORY = 1 << 17
"""Most bytes of a pattern and of RE2's caches: it is read in 6 ms at worst, usually in 15 µs."""
_READ_WORK = 40
"""Work of an instruction that is read, in instructions x characters that are matched."""
_MOST_WORK = 400_000
"""Work of reading a pattern that is refused since it is too large."""
_REPEATED = re.compile(r"(\)?)\{(?:\d{0,4},)?(\d{1,4})")
"""A closed bracket if there is one, and how often at most what is before it is repeated."""

_OPTIONS = re2.Options()
_OPTIONS.max_mem = _MAX_MEMORY
_OPTIONS.log_errors = False
_OPTIONS.never_capture = True


def fits(pattern: str, accepts: Sequence[bytes], rejects: Sequence[bytes]) -> bool:
    """Whether a pattern, white space around it left out, matches each string of `accepts` from end
    to end and none of `rejects` so. One that is invalid or too large fits nothing."""
    bare = pattern.strip()
    if len(bare) > MAX_LENGTH:
        return False
    try:
        compiled = re2.compile(bare.encode(), _OPTIONS)
    except (re2.error, UnicodeEncodeError):  # half a character of JSON
        return False
    finally:
        re2.purge()  # it would keep the last 128
    size = max(compiled.programsize, compiled.reverseprogramsize)
    if size * (sum(map(len, accepts)) + sum(map(len, rejects))) > MAX_STEPS:
        return False
    match = compiled.fullmatch
    return all(map(match, accepts)) and not any(map(match, rejects))


def reading_work(pattern: str) -> int:
    """Return about how much work it is to read a pattern, in instructions x characters."""
    if len(pattern) > 4 * MAX_LENGTH:  # what a rule takes of it may be short
        return _MOST_WORK
    atoms, groups = len(pattern), 1
    for is_group, times in _REPEATED.findall(pattern):
        if is_group:
            groups *= max(1, int(times))
        else:
            atoms += int(times)
    each = 400 if "\\p" in pattern.lower() else 8  # instructions of a class
    return min(_MOST_WORK, _READ_WORK * each * atoms * groups)
