"""Lines for one worker: what waits to be compiled, a line for each share that asked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from operator import itemgetter
from typing import Generic, TypeVar

Share = tuple[int, str]
"""A priority, and the name of who asks at it: see `engine.messages.Request.share`."""
_priority = itemgetter(0)
Item = TypeVar("Item", bound=Hashable)


class ShareLines(Generic[Item]):
    """Items that wait. The highest priority comes first, and of equal ones each share in turn with
    what it asked for first. An item that several asked for is taken once."""

    def __init__(self) -> None:
        self._lines: dict[Share, dict[Item, None]] = {}  # the share served longest ago first
        self._askers: dict[Item, Counter[Share]] = {}

    def __contains__(self, item: Item) -> bool:
        return item in self._askers

    def length(self, share: Share) -> int:
        """Number of items that wait for this share."""
        return len(self._lines.get(share, ()))

    def push(self, item: Item, share: Share) -> None:
        """Note that one more of this share asks for the item."""
        self._askers.setdefault(item, Counter())[share] += 1
        self._lines.setdefault(share, {})[item] = None

    def pop(self) -> Item | None:
        """Take the next item out of all lines; None if there is none."""
        if not self._lines:
            return None
        share = max(self._lines, key=_priority)  # the first of those
        item = next(iter(self._lines[share]))
        for asker in self._askers.pop(item):
            self._leave(item, asker)
        if share in self._lines:
            self._lines[share] = self._lines.pop(share)
        return item

    def discard(self, item: Item, share: Share) -> bool:
        """Note that one of this share, who asked, asks no more. Return whether the item left the
        lines with it; False also if it was taken before."""
        askers = self._askers.get(item)
        if askers is None:
            return False
        askers[share] -= 1
        if not askers[share]:
            del askers[share]
            self._leave(item, share)
        if not askers:
            del self._askers[item]
        return not askers

    def _leave(self, item: Item, share: Share) -> None:
        line = self._lines[share]
        del line[item]
        if not line:
            del self._lines[share]
