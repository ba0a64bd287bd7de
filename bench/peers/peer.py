"""What is said of a peer so that it can be run, as data."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """One engine with one model."""

    name: str
    engine: str
    """As tables say it."""
    how: Literal["http", "offline"]
    """Loaded by `srm loadtest`, or a program in the engine's environment that is timed there."""
    package: str = ""
    """Whose version is recorded; ours has none."""
    environment: str = ""
    """Of `installing.ENVIRONMENTS`; empty: this one."""
    model: str
    """A shape's name (`shapes.py`)."""
    suffix: str = ""
    """What the model's file is called behind that."""
    command: tuple[str, ...]
    """Of a server; offline, the program in `programs/` alone."""
    variables: dict[str, str] = {}
    concurrency: tuple[int, ...]
    """Tried one after the other; the best is the peer's figure."""
    served: str = ""
    """What requests call the model; empty: by its shape's name."""
    streams: bool = True
    """Ends a stream as OpenAI's API does; else whole replies are asked for, which have no TTFT."""
    ignores_eos: bool = True
    """Takes `ignore_eos`; else a sample may end early, which random weights rarely do."""
    task: dict[str, Any] = {}
    """What its program is told besides."""
    has_text: bool = False
    """Its prompts must be texts, not token ids."""
    is_narrow: bool = True
    """Computes in bfloat16 on a CPU too."""
    state_width: int = 4
    """Bytes of a number that a sequence keeps."""
    most: int = 0
    """Sequences that it can run at once, whatever the memory; 0: no limit known."""
