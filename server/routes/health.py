"""Routes that clients ask before they send work: health, readiness, version, world size.

GET /health: this process is alive. GET /ready: the engine makes progress and takes requests.

The engine is asked every second and answers between steps. So an answer that says more steps than
the one before, or that there is nothing to do, is progress; an engine that has work and makes no
step, and one that does not answer at all (stopped, or hanging inside a step), is stalled.
"""

from __future__ import annotations

import platform
import subprocess
from contextlib import suppress
from functools import cache, partial
from importlib import metadata
from pathlib import Path

import msgspec
from msgspec import UNSET, UnsetType

import srm
from srm.engine.client.client import EngineClient
from srm.engine.client.connection import EngineConnection
from srm.errors import EngineUnavailable
from srm.server.errors import stopping
from srm.server.http.draining import Draining
from srm.server.http.responses import add_operations
from srm.server.schema.openapi import Operation, Router

HELD_S = 60.0
"""Least seconds for which a change of weights has let nothing start, after which that is said."""
VERSION = srm.__version__


@cache
def build() -> tuple[str, str, str, str]:
    """Return the versions of server, commit, Python and MAX; empty what is not known. May block."""
    commit, root = "", Path(srm.__file__).resolve().parents[1]
    if (root / ".git").exists():
        with suppress(OSError):  # there is no git
            asked = ["git", "-C", str(root), "rev-parse", "--short", "HEAD"]
            done = subprocess.run(asked, capture_output=True, text=True, check=False)
            commit = done.stdout.strip()
    try:
        max_version = metadata.version("max")
    except metadata.PackageNotFoundError:
        max_version = ""
    return VERSION, commit, platform.python_version(), max_version


class Health(msgspec.Struct):
    status: str
    """`ok` or `ready`."""
    engines: list[str] | UnsetType = UNSET
    """State of each engine, where there are several: `ready`, or why it would not answer."""
    summary: str | UnsetType = UNSET
    """How many of several engines are ready: `1 of 2 engines`."""


class Version(msgspec.Struct):
    version: str


class Pong(msgspec.Struct):
    """An empty reply: the process is alive."""


class WorldSize(msgspec.Struct):
    world_size: int
    """Processes that each hold a part of the model."""


OPERATIONS = (
    Operation("GET", "/health", "The API process is alive.", Health),
    Operation("GET", "/ready",
              "Completions would be answered; 503 while the engine starts, drains or is gone.",
              Health),
    Operation("GET", "/version", "Of this server.", Version),
    *(Operation(method, "/ping", "Alive, as hosting services ask.", Pong)
      for method in ("GET", "POST")),
    Operation("GET", "/get_world_size", "How many processes share the model: TRL asks.", WorldSize),
)  # fmt: skip


def check_ready(client: EngineClient, stall_s: float) -> Health:
    """Return what there is to say. Raises EngineUnavailable with the reason if completions would
    not be answered, by any engine."""
    client.require_status()
    reasons = why_not_ready(client, stall_s)
    if all(reasons):
        raise EngineUnavailable(reasons[0])
    states = [reason or "ready" for reason in reasons]
    if len(states) == 1:
        return Health("ready")
    return Health("ready", states, f"{states.count('ready')} of {len(states)} engines")


def why_not_ready(client: EngineClient, stall_s: float) -> list[str]:
    """Return the reason why each engine would not answer; empty if it would."""
    return [_why_not(engine, stall_s) for engine in client.engines]


def _why_not(engine: EngineConnection, stall_s: float) -> str:
    """Return the reason why an engine would not answer; empty if it would."""
    status = engine.status
    if status is None:
        return engine.why_away
    if status.state != "ready":
        return f"the engine is {status.state}"
    if engine.silent_s > stall_s:
        return (
            f"the engine is stalled: it has not answered for {engine.silent_s:.1f} s, and "
            f"stall_s = {stall_s:g}; it is stopped, or hangs in the step after number "
            f"{status.steps}"
        )
    if status.held_s > max(stall_s, HELD_S):
        return (
            f"the engine has started nothing for {status.held_s:.1f} s: its weights are being "
            f"changed for those in {status.changing!r}"
        )
    if engine.stalled_s > stall_s:
        return (
            f"the engine is stalled: {status.running} sequences run and {status.waiting} wait, and "
            f"it has made no step for {engine.stalled_s:.1f} s, and stall_s = {stall_s:g}"
        )
    return ""


def add_routes(router: Router, client: EngineClient, stall_s: float, draining: Draining) -> None:
    """Add the routes of this module."""

    def ready() -> Health:
        if draining.is_on:
            raise stopping()
        return check_ready(client, stall_s)

    alive, version = partial(Health, "ok"), partial(Version, VERSION)
    actions = (alive, ready, version, Pong, Pong, partial(WorldSize, 1))
    add_operations(router, OPERATIONS, actions)
