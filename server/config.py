"""ServerConfig: how an API process listens, and where its engine is.

Loaded by `engine.config.load` like every other setting; nothing changes after loading.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from engine.config import DEMO_MODEL, EngineConfig

MAX_API_PROCESSES = 256


class ServerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How requests are received."""

    model: Path = DEMO_MODEL
    """Folder with config.json and tokenizer.json; the weights are the engine's business."""
    served_model_name: str = ""
    """What requests call the model; empty: the folder's name."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is every IPv4 address of the machine."""
    port: int = 8000
    """TCP port to listen on; 0 takes any free one."""
    api_processes: int = 1
    """Processes that answer requests, all on the same socket; each takes a core at most."""
    endpoint: str = EngineConfig().endpoint
    """Where the engine listens, as ZeroMQ spells it."""
    max_body_bytes: int = 32 * 1024 * 1024
    """Largest request body, in bytes."""
    drain_s: float = EngineConfig().drain_s
    """How long a stop waits for running requests, in seconds."""
    listen_fd: int = -1
    """A listening socket inherited from the supervisor, instead of host and port."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65_535:
            raise ValueError(f"port must lie in 0 … 65535, got {self.port}")
        if not 1 <= self.api_processes <= MAX_API_PROCESSES:
            raise ValueError(
                f"api_processes must be 1 … {MAX_API_PROCESSES}, got {self.api_processes}"
            )
        if self.max_body_bytes < 1:
            raise ValueError(f"max_body_bytes must be at least 1, got {self.max_body_bytes}")
        if not self.drain_s >= 0:
            raise ValueError(f"drain_s must be at least 0, got {self.drain_s}")

    @property
    def model_name(self) -> str:
        return self.served_model_name or self.model.resolve().name
