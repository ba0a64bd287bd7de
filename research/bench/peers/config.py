"""The fields of a peer in `catalog.toml`, and the settings of `python -m research.bench.peers`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import msgspec

from research.bench.frame import Settings


class Peer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine with one model."""

    name: str
    engine: str
    """Name of the engine in tables."""
    how: Literal["http", "offline", "states", "trees"]
    """http: loaded by `srm loadtest`; offline: a timed program in the engine's environment; states,
    trees: a server, a program, of the command of that name."""
    package: str = ""
    """The package whose version is recorded; ours has none."""
    environment: str = ""
    """Name of its environment in `making.ENVIRONMENTS`; empty: our own."""
    model: str
    """The name of a shape (`shapes.py`)."""
    suffix: str = ""
    """The suffix of the model's file, after the shape's name."""
    command: tuple[str, ...]
    """The server's command; offline, only the name of the program in `programs/`."""
    variables: dict[str, str] = {}
    concurrency: tuple[int, ...]
    """Numbers of concurrent sequences, tried in turn; the best is the peer's figure."""
    is_narrow: bool = True
    """Whether it computes in bfloat16 on a CPU too."""
    state_width: int = 4
    """Bytes of each number in a sequence's state."""
    most: int = 0
    """Most sequences that it can run at once, whatever the memory; 0: no limit known."""


class PeersConfig(Settings, frozen=True, forbid_unknown_fields=True):
    """Settings of `python -m research.bench.peers`."""

    peers_dir: Path = Path("~/.cache/srm-peers")
    """Folder of the other engines' environments and of all models, which takes some 8 GB."""
    peers: tuple[str, ...] = ()
    """Peers to run, by name or by how names begin; empty: all."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of weights and activations, for engines that compute in it on a CPU; others use
    float32."""
    prompt_tokens: int = 32
    """Tokens in each prompt, which are random ids."""
    output_tokens: int = 128
    """Tokens in each completion, which is greedy and not ended early."""
    seconds: float = 6.0
    """Approximate seconds to measure at each concurrency: whole waves of requests, at least one."""
    threads: int = 0
    """CPU threads of every engine; 0: one for each core."""
    timeout_s: float = 200.0
    """Most seconds for all measurements of one peer; those done by then are kept."""
    results: Path = Path("runs/peers")
    """Folder of each peer's result; a peer with a result there is not run again by `run`."""
    state_tokens: int = 20_000
    """Tokens of the conversation of `states`."""
    depth: int = 12
    """Levels of the tree of `trees`, whose nodes have two children each."""
    node_tokens: int = 8
    """Tokens of a node."""
    repetitions: int = 5
    """Measurements of each figure of `states` and `trees`."""

    @property
    def folder(self) -> Path:
        """`peers_dir` as an absolute path."""
        return self.peers_dir.expanduser().absolute()

    @property
    def cores(self) -> int:
        """Threads of every engine."""
        return self.threads or len(os.sched_getaffinity(0))
