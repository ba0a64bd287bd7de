"""Runs one peer to its result: loads its server point by point, or times its program.

Knows neither tables nor plots.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from bench.peers.config import PeersConfig
from bench.peers.loading import measure_server
from bench.peers.making import make_model, python_of
from bench.peers.peer import Peer
from bench.peers.result import Point, Result
from bench.peers.serving import free_port
from bench.peers.shapes import N_CTX, shape_of
from bench.peers.timed import measure_program
from bench.peers.watching import Watch
from engine.errors import ConfigError
from engine.records import ROOT

_VERSION = "import sys, importlib.metadata as found; print(found.version(sys.argv[1]))"


def run_peer(peer: Peer, config: PeersConfig) -> Result:
    """Measure all concurrencies that its time allows; the result says what ended it early."""
    points: list[Point] = []
    model, failure, version = make_model(peer, config.folder), "", _version(peer, config)
    values = placeholders(peer, config, model)
    command = [part.format(**values) for part in peer.command]
    try:
        with Watch() as watch:
            measure = measure_server if peer.how == "http" else measure_program
            measure(peer, config, command, values, watch, points)
    except (ConfigError, subprocess.TimeoutExpired) as error:
        is_slow = isinstance(error, subprocess.TimeoutExpired)
        failure = f"not done in {config.timeout_s:g} s" if is_slow else str(error)
    shape = shape_of(peer.model)
    dtype = values["dtype"]
    width = 2 if dtype == "bfloat16" and shape.kind == "llama" else peer.state_width
    return Result(
        name=peer.name,
        engine=peer.engine,
        how=peer.how,
        version=version,
        model=peer.model,
        dtype=dtype,
        flops_per_token=shape.flops_per_token,
        state_bytes=shape.state_bytes(width),
        most=peer.most,
        command=" ".join(command).replace(str(config.folder), "PEERS").replace(str(ROOT), "."),
        settings=settings(config),
        points=tuple(points),
        failure=failure,
    )


def settings(config: PeersConfig) -> str:
    """Describe the settings that affect results: equal ones make results comparable."""
    names = ("dtype", "prompt_tokens", "output_tokens", "seconds", "cores")
    return ", ".join(f"{name} {getattr(config, name)}" for name in names)


def placeholders(peer: Peer, config: PeersConfig, model: Path) -> dict[str, str]:
    """Return the values of the placeholders in a peer's command."""
    slots = max(peer.concurrency)
    return {
        "python": python_of(peer.environment, config.folder),
        "environment": str(config.folder / peer.environment),
        "root": str(ROOT),
        "model": str(model),
        "port": str(free_port()),
        "threads": str(config.cores),
        "slots": str(slots),
        "context": str(slots * N_CTX),
        "dtype": config.dtype if peer.is_narrow else "float32",
    }


def _version(peer: Peer, config: PeersConfig) -> str:
    if not peer.package:
        return "this commit"
    python = python_of(peer.environment, config.folder)
    found = subprocess.run(
        [python, "-c", _VERSION, peer.package], capture_output=True, text=True, check=False
    )
    if found.returncode:
        raise ConfigError(f"{peer.package} is not installed: `make peers-setup` first")
    return f"{peer.package} {found.stdout.strip()}"
