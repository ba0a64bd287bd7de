"""The settings of `srm batch`."""

from __future__ import annotations

from pathlib import Path

import msgspec

from srm.errors import ConfigError


class BatchConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of `srm batch`, besides those of the engine."""

    input: str = "-"
    """Path or URL of the requests, one a line, with or without the flag; .jsonl, .gz, .zst or
    .parquet by its end; -: standard input."""
    output: str = "-"
    """Path or URL for the results, in the same formats; -o for short; -: standard output."""
    errors: str = ""
    """Path or URL for the results of lines that failed; empty: they go to the output."""
    work_dir: str = ""
    """Folder that keeps results until they are uploaded to URLs; empty: srm-batch in the current
    folder."""
    resume: bool = False
    """Whether to continue the output of a run that ended early; if not, an existing output is
    refused."""
    shard: str = "1/1"
    """Part of the lines to answer, as i/k: every k-th line, beginning with the i-th."""
    seed: int = 0
    """Seed of requests that give none: theirs is made of it and the line's number."""
    served_model_name: str = ""
    """Name of the model in requests; empty: the folder's name."""
    chat_template: str = ""
    """File with the Jinja template of chats; empty: that of the model folder, if it has one."""
    max_body_bytes: int = 32 * 1024 * 1024
    """Longest line, in bytes; longer ones fail."""
    snapshot_interval_s: float = 60.0
    """Seconds between two snapshots of the lines in flight; 0: a snapshot only at a stop."""

    def __post_init__(self) -> None:
        index, slash, count = self.shard.partition("/")
        if not (
            slash and index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)
        ):
            raise ValueError(f"shard must be i/k with 1 ≤ i ≤ k, got {self.shard!r}")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"seed must be 0 … 2**64 - 1, got {self.seed}")
        if self.max_body_bytes < 1:
            raise ValueError(f"max_body_bytes must be at least 1, got {self.max_body_bytes}")

    def has(self, number: int) -> bool:
        """Return whether a line belongs to the shard; lines are numbered from 1."""
        index, count = self._part
        return (number - index) % count == 0

    def check_shard(self, output: Path, number: int) -> None:
        """Raise ConfigError for a line of an earlier run that is not of the shard."""
        if not self.has(number):
            raise ConfigError(
                f"output = {output} has line {number}, which is not of shard = {self.shard}: "
                "go on with the shard that it was made with, or name another output"
            )

    def count(self, total: int) -> int:
        """Return how many of the first `total` lines belong to the shard."""
        index, count = self._part
        return max(0, total - index + count) // count

    @property
    def _part(self) -> tuple[int, int]:
        index, _, count = self.shard.partition("/")
        return int(index), int(count)
