"""Limits how much may be in flight at once, and decides whose turn it is when there is no room.

Whoever has least for its weight comes first; of one owner's jobs, those of the highest priority do.
Nothing is set aside: one job alone has all the room, and gives it up as its lines end; but a job
that has less than its part need not wait for that.
"""

from __future__ import annotations

import asyncio


class ConcurrencyLimiter:
    """Limits sequences in flight, and lines, which take memory whatever their size."""

    def __init__(self, sequences: int, lines: int) -> None:
        self._max_sequences = sequences
        self._max_lines = lines
        self.sequences = 0
        """Sequences in flight."""
        self.lines = 0
        """Lines in flight."""
        self.waiting: list[LimiterShare] = []
        """Those that wait for room."""
        self._num_grants = 0
        self._holding: set[LimiterShare] = set()

    def resize(self, sequences: int) -> None:
        """Change the limit on sequences."""
        self._max_sequences = sequences
        self._grant()

    def share(self, owner: str = "", priority: int = 0, weight: float = 1.0) -> LimiterShare:
        """Create the share of one job, which takes room for one line after the other."""
        return LimiterShare(self, owner, priority, weight)

    def _fits(self, share: LimiterShare, size: int) -> bool:
        """Return whether a line fits: into what is left, or else into the job's part of the room,
        which may be over others' lines; one larger than that does once its job has no other in
        flight."""
        if self.lines >= self._max_lines:
            return False
        if self.sequences + size <= self._max_sequences:
            return True
        jobs = {share, *self._holding, *self.waiting}
        if any(job.owner == share.owner and job.priority > share.priority for job in jobs):
            return False
        part = self._max_sequences * share.weight / sum(job.weight for job in jobs)
        return share.sequences + size <= part or not share.sequences

    def _admit(self, share: LimiterShare, size: int) -> None:
        self._num_grants += 1
        self.lines += 1
        self.sequences += size
        share.sequences += size
        self._holding.add(share)
        share.last_turn = self._num_grants

    def _leave(self, share: LimiterShare) -> None:
        if share in self.waiting:
            self.waiting.remove(share)
        self._grant()

    def _grant(self) -> None:
        # One that was cancelled stays until its task wakes.
        self.waiting[:] = [share for share in self.waiting if not share.granted.done()]
        while self.waiting:
            highest: dict[str, int] = {}
            for share in self.waiting:
                highest[share.owner] = max(share.priority, highest.get(share.owner, share.priority))
            ready = [share for share in self.waiting if share.priority == highest[share.owner]]
            first = min(ready, key=LimiterShare.rank)
            if not self._fits(first, first.wanted):
                return
            self.waiting.remove(first)
            self._admit(first, first.wanted)
            first.granted.set_result(True)


class LimiterShare:
    """The part of a limiter's room that one job has."""

    granted: asyncio.Future[bool]

    def __init__(self, room: ConcurrencyLimiter, owner: str, priority: int, weight: float) -> None:
        self.owner = owner
        self.priority = priority
        """Relative to jobs of the same owner."""
        self.weight = weight
        """Relative to all other jobs; may change."""
        self.sequences = 0
        self.wanted = 0
        self.last_turn = 0
        self._limiter = room

    def rank(self) -> tuple[float, int]:
        """Sort key of waiting jobs: the smallest is next; ties go to whoever had a turn longest
        ago."""
        return self.sequences / self.weight, self.last_turn

    async def acquire(self, size: int) -> bool:
        """Wait for room for a line of `size` sequences, one call at a time; returns whether it was
        granted."""
        room = self._limiter
        if not room.waiting and room._fits(self, size):
            room._admit(self, size)
            return True
        self.wanted = size
        self.granted = asyncio.get_running_loop().create_future()
        room.waiting.append(self)
        try:
            return await self.granted
        except asyncio.CancelledError:
            if self.granted.cancelled():
                room._leave(self)
            elif self.granted.result():
                self.free(size)
            raise

    def give_up(self) -> None:
        """End a waiting `acquire` without room."""
        if self in self._limiter.waiting and not self.granted.done():
            self.granted.set_result(False)
            self._limiter._leave(self)

    def free(self, size: int) -> None:
        """Give back the room of a line that has ended."""
        room = self._limiter
        room.lines -= 1
        room.sequences -= size
        self.sequences -= size
        if not self.sequences:
            room._holding.discard(self)
        room._grant()
