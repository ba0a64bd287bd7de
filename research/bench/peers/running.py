"""Runs one peer to its result: loads its server point by point, or times its program.

A server is loaded by `srm loadtest` at one concurrency after the other; a program runs in its
engine's environment and says what it measured at each.
"""

from __future__ import annotations

import json
import math
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from research.bench.host.processes import Watch
from research.bench.host.serving import free_port, server
from research.bench.peers.config import Peer, PeersConfig
from research.bench.peers.making import PROGRAMS, make_model, python_of, surroundings
from research.bench.peers.programs.timing import FIRST_TOKEN
from research.bench.peers.shapes import VOCAB_SIZE, shape_of
from research.bench.peers.table import PeerPoint, PeerResult
from research.bench.server.load import send
from srm.errors import ConfigError
from srm.loadtest.commands.run_command import summed_up
from srm.loadtest.records import ROOT
from srm.loadtest.report.report_files import MeasuredRun

_VERSION = "import sys, importlib.metadata as found; print(found.version(sys.argv[1]))"
_START_S = 300.0
"""Most seconds until a server answers."""
_PROBE_TOKENS = 4
"""Tokens of the completion that checks whether a server is ready."""


def run_peer(peer: Peer, config: PeersConfig) -> PeerResult:
    """Measure all concurrencies that its time allows; the result says what ended it early."""
    points: list[PeerPoint] = []
    failure, values = "", placeholders(peer, config, make_model(peer, config.folder))
    about = described(peer, config, values)
    try:
        with Watch() as watch:
            measure = _measure_server if peer.how == "http" else _measure_program
            measure(peer, config, values, watch, points)
    except (subprocess.TimeoutExpired, TimeoutError):
        failure = f"not done in {config.timeout_s:g} s"
    except ConfigError as error:
        failure = str(error)
    return PeerResult(
        **about,
        how=peer.how,
        most=peer.most,
        settings=settings(config),
        points=tuple(points),
        failure=failure,
    )


def settings(config: PeersConfig) -> str:
    """Describe the settings that affect results: equal ones make results comparable."""
    names = ("dtype", "prompt_tokens", "output_tokens", "seconds", "cores")
    return ", ".join(f"{name} {getattr(config, name)}" for name in names)


def described(peer: Peer, config: PeersConfig, values: dict[str, str]) -> dict[str, Any]:
    """Return what a result says of a peer, without this machine's folders. Raises ConfigError."""
    command = " ".join(part.format(**values) for part in peer.command)
    shape, dtype = shape_of(peer.model), values["dtype"]
    width = 2 if dtype == "bfloat16" and shape.kind == "llama" else peer.state_width
    return {
        "name": peer.name,
        "engine": peer.engine,
        "version": engine_version(peer, config),
        "model": peer.model,
        "dtype": dtype,
        "flops_per_token": shape.flops_per_token,
        "state_bytes": shape.state_bytes(width),
        "command": command.replace(str(config.folder), "PEERS").replace(str(ROOT), "."),
    }


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
        "context": str(slots * shape_of(peer.model).n_ctx),
        "dtype": config.dtype if peer.is_narrow else "float32",
    }


def engine_version(peer: Peer, config: PeersConfig) -> str:
    """Return the package of a peer's engine and its version. Raises ConfigError."""
    if not peer.package:
        return "this commit"
    command = [python_of(peer.environment, config.folder), "-c", _VERSION, peer.package]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise ConfigError(f"{peer.package} is not installed: `make peers-setup` first")
    return f"{peer.package} {ran.stdout.strip()}"


@contextmanager
def started(
    peer: Peer, config: PeersConfig, values: dict[str, str], folder: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a peer's server in a folder until the end of the block."""
    command = [part.format(**values) for part in peer.command]
    variables = surroundings(peer.environment, config.folder) | peer.variables
    ask = {"model": peer.model, "prompt": 3 * [FIRST_TOKEN], "max_tokens": _PROBE_TOKENS}
    log = folder.absolute() / "server.log"
    with server(command, variables, int(values["port"]), ask, log, _START_S) as process:
        yield process


def _measure_server(
    peer: Peer,
    config: PeersConfig,
    values: dict[str, str],
    watch: Watch,
    points: list[PeerPoint],
) -> None:
    port = int(values["port"])
    with started(peer, config, values, config.results / peer.name) as process:
        watch.pid = process.pid
        deadline = time.monotonic() + config.timeout_s
        asked = {
            "served_model_name": peer.model,
            "prompt_tokens": str(config.prompt_tokens),
            "output_tokens": str(config.output_tokens),
            "temperature": 0.0,
            "stream": True,
            "ignore_eos": True,
            "vocab_size": VOCAB_SIZE,
        }

        def load(concurrency: int, requests: int) -> MeasuredRun:
            sizes = {"concurrency": concurrency, "requests": requests}
            left = max(1.0, deadline - time.monotonic())
            return summed_up(send(f"http://127.0.0.1:{port}", left, **sizes, **asked))

        first = peer.concurrency[0]
        rate = load(first, first).summary.output_tokens_per_s
        for concurrency in peer.concurrency:
            began = time.monotonic()
            loaded = load(concurrency, concurrency * waves(rate, concurrency, config))
            points.append(http_point(loaded, concurrency, watch, began, time.monotonic()))
            rate = points[-1].tokens_per_s


def http_point(
    run: MeasuredRun, concurrency: int, watch: Watch, began: float, ended: float
) -> PeerPoint:
    """Return the point of a load whose window is the whole run."""
    summary = run.summary
    start, end = summary.window
    if not summary.output_tokens_per_s:
        raise ConfigError("no tokens came")
    return PeerPoint(
        concurrency=concurrency,
        tokens_per_s=summary.output_tokens_per_s,
        seconds=[end - start],
        rss_bytes=watch.peak_rss(began, ended),
        foreign_cpus=watch.foreign_cpus(began, ended),
        ttft_p50=_known(summary.ttft.p50),
        ttft_p99=_known(summary.ttft.p99),
        itl_p50=_known(summary.itl.p50),
        client_cpu=_known(summary.cpu_share),
        warnings=tuple(run.warnings),
    )


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def waves(tokens_per_s: float, concurrency: int, config: PeersConfig) -> int:
    """Return how often to send a point's requests to take about `seconds`."""
    return max(1, round(config.seconds * tokens_per_s / (concurrency * config.output_tokens)))


def program_task(peer: Peer, config: PeersConfig, values: dict[str, str]) -> dict[str, Any]:
    """Return what every peer's program is told."""
    return {
        "model": values["model"],
        "shape": shape_of(peer.model).task(),
        "dtype": values["dtype"],
        "concurrency": peer.concurrency,
        "prompt_tokens": config.prompt_tokens,
    }


def _measure_program(
    peer: Peer,
    config: PeersConfig,
    values: dict[str, str],
    watch: Watch,
    points: list[PeerPoint],
) -> None:
    task = program_task(peer, config, values) | {
        "output_tokens": config.output_tokens,
        "seconds": config.seconds,
        "threads": config.cores,
    }
    lines: list[dict[str, Any]] = []
    try:
        run_program(peer, config, task, watch, lines)
    finally:
        points += [offline_point(line, watch) for line in lines]


def run_program(
    peer: Peer,
    config: PeersConfig,
    task: dict[str, Any],
    watch: Watch,
    lines: list[dict[str, Any]],
) -> None:
    """Run a peer's program in its engine's environment, and add what it printed to `lines`.

    Raises ConfigError if it fails, and TimeoutExpired after the peer's time.
    """
    folder = (config.results / peer.name).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "program.log"
    interpreter = python_of(peer.environment, config.folder)
    python = [interpreter, "-m", PROGRAMS + peer.command[0], json.dumps(task)]
    variables = surroundings(peer.environment, config.folder) | {"PYTHONPATH": str(ROOT)}
    variables |= {"OMP_NUM_THREADS": str(config.cores), **peer.variables}
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": log.open("wb")}
    with (
        streams["stderr"],
        subprocess.Popen(python, cwd=folder, env=variables, **streams) as process,
    ):
        watch.pid = process.pid
        try:
            process.wait(config.timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        finally:
            assert process.stdout is not None
            own = [line for line in process.stdout if line.startswith(b"{")]  # some engines talk
            lines += map(msgspec.json.decode, own)
    if process.returncode:
        raise ConfigError(f"its program failed: {log.read_text(errors='replace')[-500:].strip()}")


def offline_point(entries: dict[str, Any], watch: Watch) -> PeerPoint:
    """Return the point of a line that `programs/timing.py` printed."""
    return PeerPoint(
        concurrency=entries["concurrency"],
        tokens_per_s=entries["tokens"] / median(entries["seconds"]),
        seconds=entries["seconds"],
        rss_bytes=watch.peak_rss(entries["began"], entries["ended"]),
        foreign_cpus=watch.foreign_cpus(entries["began"], entries["ended"]),
    )
