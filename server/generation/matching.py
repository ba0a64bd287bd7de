"""Regular expressions of requests, matched by RE2 in time linear in the text.

What a pattern may cost is bounded by its length, its memory and its program; a long text under a
large program is searched on a thread, where nobody else waits for it. Knows no samples.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

import re2

from srm.engine.errors import InvalidRequest

MAX_PROGRAM = 5_000
"""Most instructions of a compiled pattern, searched forwards or backwards."""
_MAX_MEMORY = 1 << 20
"""Most bytes that a compiled pattern and RE2's caches while searching may take."""
_INLINE = 200_000
"""Most instructions x characters searched on the event loop: a millisecond or less."""


class Mark(NamedTuple):
    """The result of searching a text for a pattern."""

    matched: bool
    group: str | None = None
    """Text of the pattern's first group, if that took part."""


class Pattern:
    """A regular expression, compiled."""

    def __init__(self, source: str, wants_group: bool) -> None:
        """Raises InvalidRequest with the reason if `source` is invalid or too large."""
        options = re2.Options()
        options.max_mem = _MAX_MEMORY
        options.log_errors = False
        options.never_capture = not wants_group
        try:
            compiled = re2.compile(source.encode(), options)
        except UnicodeEncodeError:
            raise _refused(source, "it is no text in UTF-8") from None
        except re2.error as error:
            reason = error.args[0]
            message = reason.decode(errors="replace") if isinstance(reason, bytes) else str(reason)
            raise _refused(source, message) from None
        finally:
            re2.purge()  # it would keep the last 128 with all they remember
        self._size = max(compiled.programsize, compiled.reverseprogramsize)
        if self._size > MAX_PROGRAM:
            raise _refused(
                source, f"it makes {self._size} instructions of at most {MAX_PROGRAM} allowed"
            )
        if wants_group and not compiled.groups:
            raise InvalidRequest(
                f'count_by = "group" needs a group in until.match = {source!r}, which has none',
                "count_by",
            )
        self._compiled = compiled
        self._has_group = wants_group

    def find(self, text: str) -> Mark:
        """Search anywhere in a text."""
        match = self._compiled.search(text.encode())
        if match is None:
            return Mark(matched=False)
        group = match.group(1) if self._has_group else None
        return Mark(matched=True, group=None if group is None else group.decode(errors="replace"))

    async def find_all(self, texts: list[str]) -> list[Mark]:
        """Search each text, without blocking the event loop for long."""
        marks, begin, work = [], 0, 0
        for end, text in enumerate(texts, 1):
            work += self._size * len(text)
            if work > _INLINE or end == len(texts):
                part, begin = texts[begin:end], end
                if work > _INLINE:  # each its own, so that other requests get the threads too
                    marks += await asyncio.to_thread(self._find_each, part)
                else:
                    marks += self._find_each(part)
                work = 0
        return marks

    def _find_each(self, texts: list[str]) -> list[Mark]:
        return [self.find(text) for text in texts]


def _refused(source: str, reason: str) -> InvalidRequest:
    shown = source if len(source) <= 80 else source[:80] + "…"
    why = reason if len(reason) <= 160 else reason[:160] + "…"
    return InvalidRequest(f"until.match = {shown!r} is not taken: {why}", "until")
