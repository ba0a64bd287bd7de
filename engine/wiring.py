"""EngineWiring: the settings of an engine process, and how it is connected to what started it.

Whoever starts the process makes the connections; no user gives them.
"""

from __future__ import annotations

from srm.engine.config import EngineConfig


class EngineWiring(EngineConfig, frozen=True, forbid_unknown_fields=True):
    """The settings of an engine process, with its place among the others."""

    endpoint: str = "tcp://127.0.0.1:8765"
    """Address where API processes reach the engine process: `ipc://@NAME`, which is no file, or a
    loopback `tcp://`."""
    weights_note_fd: int = -1
    """Memory of the note of the weights in use, for an engine that is restarted; -1: it begins as
    this one did."""
    weights_copies: str = ""
    """Folder of copies of the weights in use; empty: none are made."""
    pause_fd: int = -1
    """Memory of the pause of all engines, which outlives them; -1: this one's ends with it."""
    heartbeat_fd: int = -1
    """Memory of the process's heartbeat; -1: nobody reads one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.endpoint.startswith(("ipc://", "tcp://")):
            raise ValueError(f"endpoint must begin with ipc:// or tcp://, got {self.endpoint!r}")
