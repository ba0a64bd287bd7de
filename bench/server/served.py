"""A server for the HTTP benchmarks: `srm serve` as a user starts it, with any engine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from bench.host.serving import Serving, serving
from bench.server.load import Load, Result
from bench.server.processes import processor_seconds, seconds_and_peaks
from engine.errors import ConfigError
from engine.records import ROOT


class Served:
    """A server that is ready."""

    def __init__(self, server: Serving) -> None:
        self._pid, self._host, self._port = server
        self.url = f"http://{server.host}:{server.port}"

    def send(self, bodies: list[dict[str, Any]]) -> Result:
        return send(self._host, self._port, bodies)

    def seconds_and_peaks(self) -> dict[str, tuple[float, int]]:
        """Return processor seconds and peak memory in bytes of each process so far."""
        return seconds_and_peaks(self._pid)

    def api_seconds(self) -> float:
        """Return the processor time that the API processes have used so far."""
        return processor_seconds(self._pid).get("server", 0.0)


def send(host: str, port: int, bodies: list[dict[str, Any]]) -> Result:
    """Send these requests at once, from a process of its own. Raises ConfigError if that fails."""
    raw = [msgspec.Raw(msgspec.json.encode(body)) for body in bodies]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "bench.server.load"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        input=msgspec.json.encode(Load(host, port, raw)),
        check=False,
        capture_output=True,
    )
    if done.returncode:
        raise ConfigError(f"http://{host}:{port}: {done.stderr.decode().strip()}")
    return msgspec.json.decode(done.stdout, type=Result)


@contextmanager
def served(engine_module: str, *flags: str) -> Iterator[Served]:
    """Start a server with these flags, and stop it at the end. Raises ConfigError if that fails."""
    with serving(*flags, engine_module=engine_module) as server:
        yield Served(server)


def completion(prompt: int, n: int, max_tokens: int, seed: int, is_stream: bool) -> dict[str, Any]:
    """Return a request for completions of exactly `max_tokens` tokens, with usage."""
    body = {
        "prompt": [prompt],
        "n": n,
        "max_tokens": max_tokens,
        "seed": seed,
        "ignore_eos": True,
    }
    if is_stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return body
