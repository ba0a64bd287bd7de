"""Limits how much may be in flight at once, and decides whose turn it is when there is no room.

Jobs of the highest priority come first; among these, whoever has least for its weight. Nothing is
set aside: one job alone has all the room, and gives it up as its lines end. Knows no lines.
"""

from __future__ import annotations

import asyncio


class ConcurrencyLimiter:
    """Limits sequences in flight, and lines, which take memory whatever their size."""

    def __init__(self, sequences: int, lines: int) -> None:
        self._max_sequences = sequences
        self._max_lines = lines
        self._sequences = 0
        self._lines = 0
        self._turns = 0
        self._waiting: list[LimiterShare] = []

    def resize(self, sequences: int) -> None:
        """Change the limit on sequences."""
        self._max_sequences = sequences
        self._grant()

    @property
    def lines(self) -> int:
        """Lines in flight."""
        return self._lines

    def share(self, priority: int = 0, weight: float = 1.0) -> LimiterShare:
        """Create the share of one job, which takes room for one line after the other."""
        return LimiterShare(self, priority, weight)

    def _fits(self, share: LimiterShare, size: int) -> bool:
        """Return whether a line fits; one larger than all the room does once its job has no other
        in flight."""
        if self._lines >= self._max_lines:
            return False
        if size > self._max_sequences:
            return not share.sequences
        return self._sequences + size <= self._max_sequences

    def _give(self, share: LimiterShare, size: int) -> None:
        self._turns += 1
        self._lines += 1
        self._sequences += size
        share.sequences += size
        share.last_turn = self._turns

    def _leave(self, share: LimiterShare) -> None:
        self._waiting.remove(share)
        self._grant()

    def _grant(self) -> None:
        while self._waiting:
            first = min(self._waiting, key=LimiterShare.rank)
            if not self._fits(first, first.wanted):
                return
            self._waiting.remove(first)
            self._give(first, first.wanted)
            first.granted.set_result(True)


class LimiterShare:
    """The part of a limiter's room that one job has."""

    granted: asyncio.Future[bool]

    def __init__(self, room: ConcurrencyLimiter, priority: int, weight: float) -> None:
        self.priority = priority
        self.weight = weight
        """Relative to jobs of the same priority; may change."""
        self.sequences = 0
        self.wanted = 0
        self.last_turn = 0
        self._room = room

    def rank(self) -> tuple[int, float, int]:
        """Sort key of waiting jobs: the smallest is next; ties go to whoever had a turn longest
        ago."""
        return -self.priority, self.sequences / self.weight, self.last_turn

    async def take(self, size: int) -> bool:
        """Wait for room for a line of `size` sequences, one call at a time; returns whether it was
        granted."""
        room = self._room
        if not room._waiting and room._fits(self, size):
            room._give(self, size)
            return True
        self.wanted = size
        self.granted = asyncio.get_running_loop().create_future()
        room._waiting.append(self)
        try:
            return await self.granted
        except asyncio.CancelledError:
            if self.granted.cancelled():
                room._leave(self)
            elif self.granted.result():
                self.free(size)
            raise

    def give_up(self) -> None:
        """End a waiting `take` without room."""
        if self in self._room._waiting:
            self._room._leave(self)
            self.granted.set_result(False)

    def free(self, size: int) -> None:
        """Give back the room of a line that has ended."""
        room = self._room
        room._lines -= 1
        room._sequences -= size
        self.sequences -= size
        room._grant()
