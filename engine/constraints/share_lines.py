"""Lines for a few workers: what waits to be compiled, a line for each share that asked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from operator import itemgetter
from typing import Generic, TypeVar

Share = tuple[int, str]
"""A priority, and the name of who asks at it: see `engine.messages.Request.share`."""
_rank = itemgetter(0, 1)
Item = TypeVar("Item", bound=Hashable)


class ShareLines(Generic[Item]):
    """Items that wait, and those that are worked on, at most one of each share at a time. The
    highest priority comes first, then what nobody has worked on yet, and of equal ones each share
    in turn with what it asked for first. An item that several asked for is taken once."""

    def __init__(self) -> None:
        # By priority, whether nobody has worked on it yet, and name; the one served longest ago
        # first.
        self._lines: dict[tuple[int, bool, str], dict[Item, None]] = {}
        self._askers: dict[Item, Counter[Share]] = {}  # of those that wait or are worked on
        self._working: dict[Item, Share] = {}  # whose turn it was
        self._begun: set[Item] = set()

    def __contains__(self, item: Item) -> bool:
        """Whether it waits."""
        return item in self._askers and item not in self._working

    def waiting(self, share: Share) -> list[Item]:
        """Return the items that wait for this share."""
        priority, name = share
        lines = (self._lines.get((priority, is_new, name), {}) for is_new in (True, False))
        return [item for line in lines for item in line]

    def push(self, item: Item, share: Share) -> None:
        """Note that one more of this share asks for the item."""
        self._askers.setdefault(item, Counter())[share] += 1
        if item not in self._working:
            self._lines.setdefault(self._line(item, share), {})[item] = None

    def pop(self, only_new: bool = False) -> Item | None:
        """Take the next item out of all lines, to work on it until `finish` or `put_back`; None if
        there is none. `only_new`: one that nobody has worked on yet."""
        busy = {*self._working.values()}
        ready = [
            (priority, is_new, name)
            for priority, is_new, name in self._lines
            if (priority, name) not in busy and (is_new or not only_new)
        ]
        if not ready:
            return None
        line = max(ready, key=_rank)  # the first of those
        item = next(iter(self._lines[line]))
        for asker in self._askers[item]:
            self._leave(item, asker)
        if line in self._lines:
            self._lines[line] = self._lines.pop(line)
        self._working[item] = line[0], line[2]
        return item

    def put_back(self, item: Item) -> bool:
        """Have an item that was taken wait again, behind those that are new. Return whether anybody
        still asks for it; else it is finished."""
        self._begun.add(item)
        del self._working[item]
        for share in self._askers.get(item, ()):
            self._lines.setdefault(self._line(item, share), {})[item] = None
        if item in self._askers:
            return True
        self._begun.discard(item)
        return False

    def finish(self, item: Item) -> None:
        """Forget an item that was taken."""
        del self._working[item]
        self._askers.pop(item, None)
        self._begun.discard(item)

    def discard(self, item: Item, share: Share) -> bool:
        """Note that one of this share, who asked, asks no more. Return whether the item left the
        lines with it; False also if it was taken before."""
        askers = self._askers.get(item)
        if askers is None:
            return False
        askers[share] -= 1
        is_waiting = item not in self._working
        if not askers[share]:
            del askers[share]
            if is_waiting:
                self._leave(item, share)
        if askers:
            return False
        del self._askers[item]
        if is_waiting:
            self._begun.discard(item)
        return is_waiting

    def _line(self, item: Item, share: Share) -> tuple[int, bool, str]:
        return share[0], item not in self._begun, share[1]

    def _leave(self, item: Item, share: Share) -> None:
        key = self._line(item, share)
        line = self._lines[key]
        del line[item]
        if not line:
            del self._lines[key]
