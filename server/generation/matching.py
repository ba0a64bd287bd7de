"""Regular expressions of requests, matched by RE2 in time linear in the text.

What a pattern may cost is bounded by its length, its memory and its program; a long text under a
large program is searched on a thread, where nobody else waits for it. Knows no samples.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import re2

from srm.errors import InvalidRequest

MAX_PROGRAM = 5_000
"""Most instructions of a compiled pattern, searched forwards or backwards."""
_MAX_MEMORY = 1 << 20
"""Most bytes that a compiled pattern and RE2's caches while searching may take."""
INLINE = 200_000
"""Most instructions x characters searched on the event loop: a millisecond or less."""

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class Mark(NamedTuple):
    """The result of searching a text for a pattern."""

    matched: bool
    group: str | None = None
    """Text of the pattern's first group, if that took part, or without one of all it matched."""


class Pattern:
    """A regular expression, compiled."""

    def __init__(self, source: str, wants_group: bool, field: str = "until.match") -> None:
        """Raises InvalidRequest with the reason if `source`, which is that of `field`, is invalid
        or too large."""
        options = re2.Options()
        options.max_mem = _MAX_MEMORY
        options.log_errors = False
        options.never_capture = not wants_group
        try:
            compiled = re2.compile(source.encode(), options)
        except UnicodeEncodeError:
            raise _refused(field, source, "it is no text in UTF-8") from None
        except re2.error as error:
            reason = error.args[0]
            message = reason.decode(errors="replace") if isinstance(reason, bytes) else str(reason)
            raise _refused(field, source, message) from None
        finally:
            re2.purge()  # it would keep the last 128 with all they remember
        self.size = max(compiled.programsize, compiled.reverseprogramsize)
        """Number of instructions."""
        if self.size > MAX_PROGRAM:
            reason = f"it makes {self.size} instructions of at most {MAX_PROGRAM} allowed"
            raise _refused(field, source, reason)
        self.has_group = compiled.groups > 0
        self._compiled = compiled
        self._group = int(self.has_group) if wants_group else None

    def find(self, text: str) -> Mark:
        """Search anywhere in a text."""
        match = self._compiled.search(text.encode())
        if match is None:
            return Mark(matched=False)
        group = None if self._group is None else match.group(self._group)
        return Mark(matched=True, group=None if group is None else group.decode(errors="replace"))

    async def find_all(self, texts: list[str]) -> list[Mark]:
        """Search each text, without blocking the event loop for long."""
        return await in_parts(self.find, texts, lambda text: self.size * len(text))


async def in_parts(
    each: Callable[[_Item], _Result], items: list[_Item], work: Callable[[_Item], int]
) -> list[_Result]:
    """Return what `each` makes of the items, without blocking the event loop for long. `work` is
    that of an item, in instructions x characters."""
    results: list[_Result] = []
    begin, total = 0, 0
    for end, item in enumerate(items, 1):
        total += work(item)
        if total > INLINE or end == len(items):
            part, begin = items[begin:end], end
            if total > INLINE:  # each its own, so that other requests get the threads too
                results += await asyncio.to_thread(_apply, each, part)
            else:
                results += _apply(each, part)
            total = 0
    return results


def _apply(each: Callable[[_Item], _Result], items: list[_Item]) -> list[_Result]:
    return [each(item) for item in items]


def _refused(field: str, source: str, reason: str) -> InvalidRequest:
    shown = source if len(source) <= 80 else source[:80] + "…"
    why = reason if len(reason) <= 160 else reason[:160] + "…"
    return InvalidRequest(
        f"{field} = {shown!r} is not allowed: {why}", re.split(r"[.\[]", field, maxsplit=1)[0]
    )
