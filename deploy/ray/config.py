"""The settings of a batch over a cluster. Needs no Ray."""

from __future__ import annotations

import math
from typing import Literal

import msgspec


class RayBatchConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of a batch over a cluster, besides some of `srm batch` and those of the engine."""

    input: str = ""
    """File of requests, or folder of them, as a path or a URI; .parquet by its end, or lines."""
    output: str = ""
    """Folder for the results, a file for each shard; -o for short."""
    output_format: Literal["jsonl", "jsonl.gz", "jsonl.zst", "parquet"] = "jsonl"
    """Format of the results."""
    resume: bool = False
    """Whether to continue the output of a run that ended early; if not, an existing output is
    refused."""
    shard_lines: int = 1_000
    """Most lines in a shard, the unit that is answered again if an engine is lost."""
    actors: int = 1
    """Number of engines to begin with, each in an actor of its own."""
    max_actors: int = 0
    """Most engines, where the cluster has or gets room for more; 0: as many as `actors`."""
    cpus_per_actor: float = 1.0
    """Processors that Ray reserves for each engine; an engine on a GPU gets a GPU too."""

    def __post_init__(self) -> None:
        for name in ("input", "output"):
            if not getattr(self, name):
                raise ValueError(f"{name} is missing: a path, or a URI such as s3://bucket/folder")
        for name in ("shard_lines", "actors"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_actors and self.max_actors < self.actors:
            raise ValueError(
                f"max_actors must be 0 or at least actors = {self.actors}, got {self.max_actors}"
            )
        if not 0 <= self.cpus_per_actor < math.inf:
            raise ValueError(f"cpus_per_actor must be at least 0, got {self.cpus_per_actor}")
