"""Runs a peer's program in its engine's environment, and reads its result at each concurrency."""

from __future__ import annotations

import json
import subprocess
from statistics import median
from typing import Any

import msgspec

from bench.peers.config import PeersConfig
from bench.peers.making import surroundings
from bench.peers.peer import Peer
from bench.peers.result import Point
from bench.peers.shapes import shape_of
from bench.peers.watching import Watch
from engine.errors import ConfigError
from engine.records import ROOT

PROGRAMS = "bench.peers.programs."


def measure_program(
    peer: Peer,
    config: PeersConfig,
    command: list[str],
    values: dict[str, str],
    watch: Watch,
    points: list[Point],
) -> None:
    task = {
        "model": values["model"],
        "shape": shape_of(peer.model).task(),
        "dtype": values["dtype"],
        "concurrency": peer.concurrency,
        "prompt_tokens": config.prompt_tokens,
        "output_tokens": config.output_tokens,
        "seconds": config.seconds,
        "threads": config.cores,
        **peer.task,
    }
    folder = (config.results / peer.name).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "program.log"
    python = [values["python"], "-m", PROGRAMS + command[0], json.dumps(task)]
    variables = surroundings(peer.environment, config.folder) | {"PYTHONPATH": str(ROOT)}
    variables |= {"OMP_NUM_THREADS": str(config.cores), **peer.variables}
    with (
        log.open("wb") as said,
        subprocess.Popen(
            python, cwd=folder, env=variables, stdout=subprocess.PIPE, stderr=said
        ) as process,
    ):
        watch.pid = process.pid
        try:
            process.wait(config.timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        finally:
            assert process.stdout is not None
            lines = [line for line in process.stdout if line.startswith(b"{")]  # some engines talk
            points += [offline_point(msgspec.json.decode(line), watch) for line in lines]
    if process.returncode:
        raise ConfigError(f"its program failed: {log.read_text(errors='replace')[-500:].strip()}")


def offline_point(found: dict[str, Any], watch: Watch) -> Point:
    """Return the point of a line that `programs/timing.py` printed."""
    return Point(
        concurrency=found["concurrency"],
        tokens_per_s=found["tokens"] / median(found["seconds"]),
        seconds=found["seconds"],
        rss_bytes=watch.peak_rss(found["began"], found["ended"]),
        foreign_cpus=watch.foreign_cpus(found["began"], found["ended"]),
    )
