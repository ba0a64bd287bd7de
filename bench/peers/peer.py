"""The description of a peer, as data from which it can be run."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """One engine with one model."""

    name: str
    engine: str
    """As named in tables."""
    how: Literal["http", "offline"]
    """http: loaded by `srm loadtest`; offline: a timed program in the engine's environment."""
    package: str = ""
    """The package whose version is recorded; ours has none."""
    environment: str = ""
    """One of `installing.ENVIRONMENTS`; empty: this one."""
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
