"""ServerWiring: the settings of an API or jobs process, and how it is connected to the others.

The supervisor makes the connections; no user gives them.
"""

from __future__ import annotations

from srm.engine.wiring import EngineWiring
from srm.server.config import ServerConfig


class ServerWiring(ServerConfig, frozen=True, forbid_unknown_fields=True):
    """The settings of an API or jobs process, with its place among the others."""

    endpoint: str = EngineWiring().endpoint
    """ZeroMQ address of the engine; several engines' addresses have commas between them."""
    listen_fd: int = -1
    """Listening socket inherited from the supervisor, used instead of host and port; -1: none."""
    admin_fd: int = -1
    """Listening socket used instead of admin_host and admin_port; -1: none."""
    limits_fd: int = -1
    """Memory inherited from the supervisor, in which API processes count rate limits together; -1:
    none."""
    model_id: str = ""
    """Identifier of the model, which tells its batches from those of other models."""
    heartbeat_fd: int = -1
    """Memory of the process's heartbeat; -1: nobody reads one."""
    kept_model: str = ""
    """Copy of the model's folder from the server's start, read where the folder has changed; empty:
    none."""
    example: str = ""
    """The model's own request to try first, as JSON; empty: it has none."""
    why_no_jobs_fd: int = -1
    """Memory of the text that says why batches cannot run, while they cannot; -1: there is none."""
