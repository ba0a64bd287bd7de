"""Starts a peer's server and loads it by `srm loadtest` at one concurrency after the other."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from bench.peers.config import PeersConfig
from bench.peers.making import surroundings
from bench.peers.peer import Peer
from bench.peers.programs.timing import FIRST_TOKEN
from bench.peers.result import Point
from bench.peers.serving import server
from bench.peers.shapes import VOCAB_SIZE
from bench.peers.watching import Watch
from engine.errors import ConfigError
from engine.records import ROOT

_PROBE_TOKENS = 4
"""Tokens of the completion that checks whether a server is ready."""


def measure_server(
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
    prompt = "a b c" if peer.has_text else 3 * [FIRST_TOKEN]
    served = peer.served.format(**values) or peer.model
    ask = {"model": served, "prompt": prompt, "max_tokens": _PROBE_TOKENS}
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
    """Run `srm loadtest`; return its summary, with its warnings."""
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
        "stream": "true" if peer.streams else "false",
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
        said = (done.stderr or done.stdout).strip()[-500:]
        raise ConfigError(f"the load of {concurrency} failed: {said}")
    report = msgspec.json.decode((output / "report.json").read_bytes())
    (run,) = report["runs"]
    summary: dict[str, Any] = run["summary"] | {"warnings": run["warnings"]}
    if summary["completed"] < requests:
        raise ConfigError(f"{summary['completed']} of {requests} requests: {summary['errors']}")
    return summary


def http_point(
    summary: dict[str, Any], concurrency: int, watch: Watch, began: float, ended: float
) -> Point:
    """Return the point of a loadtest summary whose window is the whole run."""
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


def waves(tokens_per_s: float | None, concurrency: int, config: PeersConfig) -> int:
    """Return how often to send a point's requests to take about `seconds`; 1 if unknown."""
    if tokens_per_s is None:
        return 1
    return max(1, round(config.seconds * tokens_per_s / (concurrency * config.output_tokens)))
