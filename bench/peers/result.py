"""What is known of a peer after its run, as data."""

from __future__ import annotations

import msgspec


class Point(msgspec.Struct, frozen=True):
    """One concurrency. Times are seconds; null is what offline programs cannot know."""

    concurrency: int
    tokens_per_s: float
    """Generated tokens by the whole time of whole waves of requests, prompts included."""
    seconds: list[float]
    """Of each repetition."""
    rss_bytes: int
    """The most that the engine's processes had."""
    foreign_cpus: float | None
    """Cores' worth of work by other processes meanwhile; null: too short to see."""
    ttft_p50: float | None = None
    ttft_p99: float | None = None
    itl_p50: float | None = None
    client_cpu: float | None = None
    """Of one core, of the busiest client process."""
    warnings: tuple[str, ...] = ()
    """What the load generator says against its own figures."""


class Result(msgspec.Struct, frozen=True):
    """One peer."""

    name: str
    engine: str
    how: str
    version: str
    model: str
    dtype: str
    flops_per_token: int
    state_bytes: int
    """Of one sequence of the whole context, computed from shapes."""
    most: int
    """Sequences that the engine can run at once, whatever the memory; 0: no limit known."""
    command: str
    settings: str
    """What the run was asked for; a result of other settings is not taken over."""
    points: tuple[Point, ...]
    failure: str = ""
    """Why there is no more."""

    @property
    def best(self) -> Point | None:
        """The fastest."""
        return max(self.points, key=lambda point: point.tokens_per_s, default=None)

    def useful(self, share: float, memory_bytes: float) -> int:
        """Most sequences at once, of those tried, at that share of its best, in that memory.

        Requests beyond what the engine can run at once wait, and are not counted.
        """
        best = self.best
        fitting = [
            point.concurrency
            for point in self.points
            if best
            and point.tokens_per_s >= share * best.tokens_per_s
            and point.rss_bytes <= memory_bytes
        ]
        found = max(fitting, default=0)
        return min(found, self.most) if self.most else found

    def fitting(self, memory_bytes: float) -> int:
        """Sequences whose states fit that memory, nothing else counted, within `most`."""
        found = int(memory_bytes // self.state_bytes)
        return min(found, self.most) if self.most else found
