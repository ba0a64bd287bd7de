"""The peers of `catalog.toml`, in the order in which they are run."""

from __future__ import annotations

import tomllib
from pathlib import Path

import msgspec

from research.bench.peers.config import Peer
from srm.errors import ConfigError

_FAMILIES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())["peers"]
PEERS = tuple(
    msgspec.convert(
        family | {"name": family["name"].format(model=model), "model": model, "concurrency": tried},
        Peer,
    )
    for family in _FAMILIES
    for model, tried in family["concurrency"].items()
)


def chosen(names: tuple[str, ...]) -> list[Peer]:
    """Return the peers whose names begin with one of these; all if none is given.

    Raises ConfigError for a name that matches no peer.
    """
    for name in names:
        if not any(peer.name.startswith(name) for peer in PEERS):
            known = ", ".join(peer.name for peer in PEERS)
            raise ConfigError(f"peers: {name!r} begins no name; known are {known}")
    return [peer for peer in PEERS if not names or peer.name.startswith(names)]
