"""Settings of the comparison. Knows no engine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import msgspec

from engine.records import RECORDS


class PeersConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of `python -m bench.peers`."""

    peers_dir: Path = Path("~/.cache/srm-peers")
    """Folder of the other engines' environments and of all models; some 8 GB."""
    peers: tuple[str, ...] = ()
    """Which to run, by name or by what names begin with. Empty: all."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of weights and activations, where an engine computes in it on a CPU; else float32."""
    prompt_tokens: int = 32
    """Of each prompt, random ids."""
    output_tokens: int = 128
    """Of each completion, greedy, none ended early."""
    seconds: float = 6.0
    """Whole waves of requests are measured, at least one, about so long for each concurrency."""
    threads: int = 0
    """That every engine computes with; 0: as many as there are cores."""
    start_s: float = 300.0
    """How long a server may take until it answers."""
    timeout_s: float = 200.0
    """How long all measurements of one peer may take; those that are done then are kept."""
    memory_gib: float = 8.0
    """Memory that sequences running at once are counted into."""
    results: Path = Path("runs/peers")
    """Folder of what each peer gave; who has a result there is not run again."""
    output: Path = RECORDS
    """Folder that the record is written to."""

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "output_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.threads < 0:
            raise ValueError(f"threads must be at least 0, got {self.threads}")
        for name in ("seconds", "start_s", "timeout_s", "memory_gib"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")

    @property
    def folder(self) -> Path:
        """`peers_dir` as an absolute path."""
        return self.peers_dir.expanduser().absolute()

    @property
    def cores(self) -> int:
        """Threads of every engine."""
        return self.threads or len(os.sched_getaffinity(0))
