"""Regular expressions that samples write, checked by strings that must and must not match.

RE2 reads them. Its time is linear in the strings, and a pattern is bounded by its length, its
memory and its steps, whoever wrote it.
"""

from __future__ import annotations

from collections.abc import Sequence

import re2

MAX_LENGTH = 256
"""Most characters of a sample's pattern."""
MAX_STEPS = 2_000_000
"""Most instructions of a sample's pattern x bytes of all strings: 10 ms at worst."""
_MAX_MEMORY = 1 << 17
"""Most bytes of a pattern and of RE2's caches: it is read in 2 ms at worst, usually in 15 µs."""

_OPTIONS = re2.Options()
_OPTIONS.max_mem = _MAX_MEMORY
_OPTIONS.log_errors = False
_OPTIONS.never_capture = True


def fits(pattern: str, accepts: Sequence[bytes], rejects: Sequence[bytes]) -> bool:
    """Whether a pattern, spaces around it left out, matches all of each string of `accepts` and of
    none of `rejects`. One that is invalid or too large fits nothing."""
    bare = pattern.strip()
    if len(bare) > MAX_LENGTH:
        return False
    try:
        compiled = re2.compile(bare.encode(), _OPTIONS)
    except re2.error:
        return False
    finally:
        re2.purge()  # it would keep the last 128
    size = max(compiled.programsize, compiled.reverseprogramsize)
    if size * (sum(map(len, accepts)) + sum(map(len, rejects))) > MAX_STEPS:
        return False
    match = compiled.fullmatch
    return all(map(match, accepts)) and not any(map(match, rejects))
