"""The result of a peer's run, as data."""

from __future__ import annotations

import msgspec


class Point(msgspec.Struct, frozen=True):
    """The measurement at one concurrency. Times are seconds; offline programs leave some null."""

    concurrency: int
    tokens_per_s: float
    """Generated tokens divided by the whole time of whole waves of requests, prompts included."""
    seconds: list[float]
    """The time of each repetition."""
    rss_bytes: int
    """Peak memory of the engine's processes."""
    foreign_cpus: float | None
    """Cores used by other processes meanwhile; null: too short to measure."""
    ttft_p50: float | None = None
    ttft_p99: float | None = None
    itl_p50: float | None = None
    client_cpu: float | None = None
    """Share of one core used by the busiest client process."""
    warnings: tuple[str, ...] = ()
    """Warnings of the load generator about its own figures."""


class Result(msgspec.Struct, frozen=True):
    """The result of one peer."""

    name: str
    engine: str
    how: str
    version: str
    model: str
    dtype: str
    flops_per_token: int
    state_bytes: int
    """Bytes of one sequence's state at the whole context, computed from shapes."""
    most: int
    """Most sequences that the engine can run at once, whatever the memory; 0: no limit known."""
    command: str
    settings: str
    """The run's settings; a result of other settings is not reused."""
    points: tuple[Point, ...]
    failure: str = ""
    """Why the run ended early; empty: it did not."""

    @property
    def best(self) -> Point | None:
        """The point with the highest rate."""
        return max(self.points, key=lambda point: point.tokens_per_s, default=None)

    def useful(self, share: float, memory_bytes: float) -> int:
        """Return the most sequences tried that reach `share` of the best rate within that memory.

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
        """Return how many states fit that memory, nothing else counted, within `most`."""
        found = int(memory_bytes // self.state_bytes)
        return min(found, self.most) if self.most else found
