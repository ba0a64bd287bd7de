"""The settings of `python -m bench.ray`. Needs no Ray."""

from __future__ import annotations

from bench.frame import Settings


class RayDataConfig(Settings, frozen=True):
    """Settings of `python -m bench.ray data`."""

    lines: int = 20_000
    """Lines of the input."""
    shard_lines: int = 500
    """Most lines of a shard."""
    nodes: int = 3
    """Nodes of the cluster, of which one is killed midway."""
    max_step_rows: int = 512
    """The setting of every engine."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nodes < 2:
            raise ValueError(f"nodes must be at least 2, since one is killed, got {self.nodes}")


class RayServeConfig(Settings, frozen=True):
    """Settings of `python -m bench.ray serve`."""

    concurrency: int = 8
    """Clients that wait for whole replies, one request after the other."""
    streams: int = 4
    """Clients that read streams."""
    max_tokens: int = 64
    """Tokens of each request."""
    seconds: float = 30.0
    """How long they ask; a third of it has passed when one of two replicas is killed."""
