"""One peer, from its start to its result: its server loaded point by point, or its program timed.

Knows neither tables nor plots.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from engine.errors import ConfigError
from engine.records import ROOT
from loadtest.peers.catalog import Peer
from loadtest.peers.config import PeersConfig
from loadtest.peers.making import make_model, python_of, surroundings
from loadtest.peers.programs.timing import FIRST_TOKEN
from loadtest.peers.result import Point, Result
from loadtest.peers.serving import free_port, server
from loadtest.peers.shapes import N_CTX, VOCAB_SIZE, shape_of
from loadtest.peers.watching import Watch

PROGRAMS = "loadtest.peers.programs."
_VERSION = "import sys, importlib.metadata as found; print(found.version(sys.argv[1]))"


def run_peer(peer: Peer, config: PeersConfig) -> Result:
    """All its concurrencies, as far as its time goes; what ends it early stands in the result."""
    points: list[Point] = []
    model, failure, version = make_model(peer, config.folder), "", _version(peer, config)
    values = placeholders(peer, config, model)
    command = [part.format(**values) for part in peer.command]
    try:
        with Watch() as watch:
            measure = _measure_server if peer.how == "http" else _measure_program
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
    """Of what is measured: results are comparable if these are the same."""
    names = ("dtype", "prompt_tokens", "output_tokens", "seconds", "cores")
    return ", ".join(f"{name} {getattr(config, name)}" for name in names)


def placeholders(peer: Peer, config: PeersConfig, model: Path) -> dict[str, str]:
    """What stands between braces in a peer's command."""
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


def waves(tokens_per_s: float | None, concurrency: int, config: PeersConfig) -> int:
    """How many times all of a point's requests are sent, for about `seconds`; 1 if unknown."""
    if tokens_per_s is None:
        return 1
    return max(1, round(config.seconds * tokens_per_s / (concurrency * config.output_tokens)))


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


def _measure_server(
    peer: Peer,
    config: PeersConfig,
    command: list[str],
    values: dict[str, str],
    watch: Watch,
    points: list[Point],
) -> None:
    folder = (config.results / peer.name).absolute()
    variables = surroundings(peer.environment, config.folder) | peer.variables
    port = int(values["port"])
    log = folder / "server.log"
    prompt = "a" if peer.has_text else [FIRST_TOKEN]
    served = peer.served.format(**values) or peer.model
    ask = {"model": served, "prompt": prompt, "max_tokens": 1}
    with server(command, variables, port, ask, log, config.start_s) as process:
        watch.pid = process.pid
        deadline = time.monotonic() + config.timeout_s
        first = peer.concurrency[0]
        warm = _load(peer, config, served, port, first, first, folder / "warm", deadline)
        rate = warm["output_tokens_per_s"]
        for concurrency in peer.concurrency:
            requests = concurrency * waves(rate, concurrency, config)
            began = time.monotonic()
            found = _load(
                *(peer, config, served, port, concurrency, requests),
                folder / str(concurrency),
                deadline,
            )
            point = http_point(found, concurrency, watch, began, time.monotonic())
            points.append(point)
            rate = point.tokens_per_s


def _load(
    peer: Peer,
    config: PeersConfig,
    served: str,
    port: int,
    concurrency: int,
    requests: int,
    output: Path,
    deadline: float,
) -> dict[str, Any]:
    """The summary of a run of `srm loadtest`, with its warnings."""
    flags: dict[str, object] = {
        "url": f"http://127.0.0.1:{port}",
        "served-model-name": served,
        "arrivals": "concurrent",
        "concurrency": concurrency,
        "requests": requests,
        "duration-s": 0,
        "prompt-tokens": config.prompt_tokens,
        "output-tokens": config.output_tokens,
        "temperature": 0,
        "ignore-eos": "true" if peer.ignores_eos else "false",
        "timeout-s": config.timeout_s,
        "grace-s": config.timeout_s,
        "metrics-url": "none",
        "output": output,
    }
    if peer.has_text:
        flags["tokenizer"] = config.folder / "models" / "tokenizer" / "tokenizer.json"
    else:
        flags["vocab-size"] = VOCAB_SIZE
    command = [sys.executable, str(ROOT / "srm.py"), "loadtest", "run"]
    done = subprocess.run(
        [*command, *(f"--{name}={value}" for name, value in flags.items())],
        capture_output=True,
        text=True,
        timeout=max(1.0, deadline - time.monotonic()),
        check=False,
    )
    if done.returncode:
        raise ConfigError(f"the load of {concurrency} failed: {done.stderr.strip()[-500:]}")
    report = msgspec.json.decode((output / "report.json").read_bytes())
    (run,) = report["runs"]
    summary: dict[str, Any] = run["summary"] | {"warnings": run["warnings"]}
    if summary["completed"] < requests:
        raise ConfigError(f"{summary['completed']} of {requests} requests: {summary['errors']}")
    return summary


def http_point(
    summary: dict[str, Any], concurrency: int, watch: Watch, began: float, ended: float
) -> Point:
    """Of a summary of the harness whose window is the whole run."""
    start, end = summary["window"]
    if not summary["output_tokens_per_s"]:
        raise ConfigError("no tokens came")
    return Point(
        concurrency=concurrency,
        tokens_per_s=summary["output_tokens_per_s"],
        seconds=[end - start],
        rss_bytes=watch.peak_rss(began, ended),
        foreign_cpus=watch.foreign_cpus(began, ended),
        ttft_p50=summary["ttft"]["p50"],
        ttft_p99=summary["ttft"]["p99"],
        itl_p50=summary["itl"]["p50"],
        client_cpu=summary["cpu_share"],
        warnings=tuple(summary["warnings"]),
    )


def _measure_program(
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
    """Of a line of `programs/timing.py`."""
    return Point(
        concurrency=found["concurrency"],
        tokens_per_s=found["tokens"] / median(found["seconds"]),
        seconds=found["seconds"],
        rss_bytes=watch.peak_rss(found["began"], found["ended"]),
        foreign_cpus=watch.foreign_cpus(found["began"], found["ended"]),
    )
