"""The settings of `python -m research.bench.ray`. Needs no Ray."""

from __future__ import annotations

from research.bench.frame import Settings


class RayDataConfig(Settings, frozen=True):
    """Settings of `python -m research.bench.ray data`."""

    lines: int = 20_000
    """Number of lines in the input."""
    shard_lines: int = 500
    """Most lines in a shard."""
    nodes: int = 3
    """Number of nodes of the cluster, one of which is killed midway."""
    max_step_rows: int = 512
    """Engine setting `max_step_rows` of every engine."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nodes < 2:
            raise ValueError(f"nodes must be at least 2, since one is killed, got {self.nodes}")


class RayServeConfig(Settings, frozen=True):
    """Settings of `python -m research.bench.ray serve`."""

    concurrency: int = 8
    """Number of clients that wait for whole replies, one request after the other."""
    streams: int = 4
    """Number of clients that read streams."""
    max_tokens: int = 64
    """Tokens of each request."""
    seconds: float = 30.0
    """Seconds that clients send requests; after a third of them one of two replicas is killed."""
