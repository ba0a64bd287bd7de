"""The fields of a peer in `catalog.toml`, and the settings of `python -m bench.peers`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

import msgspec

from bench.frame import Settings


class Peer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine with one model."""

    name: str
    engine: str
    """As named in tables."""
    how: Literal["http", "offline"]
    """http: loaded by `srm loadtest`; offline: a timed program in the engine's environment."""
    package: str = ""
    """The package whose version is recorded; ours has none."""
    environment: str = ""
    """One of `making.ENVIRONMENTS`; empty: this one."""
    model: str
    """The name of a shape (`shapes.py`)."""
    suffix: str = ""
    """The suffix of the model's file, after the shape's name."""
    command: tuple[str, ...]
    """The server's command; offline, only the name of the program in `programs/`."""
    variables: dict[str, str] = {}
    concurrency: tuple[int, ...]
    """Numbers of concurrent sequences, tried in turn; the best is the peer's figure."""
    served: str = ""
    """The model's name in requests; empty: the shape's name."""
    streams: bool = True
    """Whether it ends streams as OpenAI's API does; else replies are whole and have no TTFT."""
    ignores_eos: bool = True
    """Whether it takes `ignore_eos`; else samples may end early, with random weights rarely."""
    task: dict[str, Any] = {}
    """Further members of its program's task."""
    has_text: bool = False
    """Whether its prompts must be texts, not token ids."""
    is_narrow: bool = True
    """Whether it computes in bfloat16 on a CPU too."""
    state_width: int = 4
    """Bytes of each number in a sequence's state."""
    most: int = 0
    """Most sequences that it can run at once, whatever the memory; 0: no limit known."""


class PeersConfig(Settings, frozen=True, forbid_unknown_fields=True):
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

    @property
    def folder(self) -> Path:
        """`peers_dir` as an absolute path."""
        return self.peers_dir.expanduser().absolute()

    @property
    def cores(self) -> int:
        """Threads of every engine."""
        return self.threads or len(os.sched_getaffinity(0))
