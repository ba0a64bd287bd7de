"""A server in processes of its own, from its start to its end. Knows no engine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from engine.errors import ConfigError

_STOP_S = 20.0
_SAID = 600
"""Characters of its log that an error shows."""


def free_port() -> int:
    """Return a currently free port of the loopback interface."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def server(
    command: list[str],
    variables: Mapping[str, str],
    port: int,
    ask: Mapping[str, Any],
    log: Path,
    start_s: float,
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a server and wait until it answers a completion; end it with all its processes.

    `ask` is the body of that request. Some servers answer other routes long before this one. Raises
    ConfigError, with the end of its log, if it ends or does not answer within `start_s`.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with (
        log.open("wb") as said,
        subprocess.Popen(
            command,
            cwd=log.parent,
            env=dict(variables),
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process,
    ):
        try:
            _wait_until_ready(process, port, ask, log, start_s)
            yield process
        finally:
            _end(process)


def _wait_until_ready(
    process: subprocess.Popen[bytes], port: int, ask: Mapping[str, Any], log: Path, start_s: float
) -> None:
    url = f"http://127.0.0.1:{port}/v1/completions"
    deadline, said = time.monotonic() + start_s, ""
    while time.monotonic() < deadline and process.poll() is None:
        with suppress(httpx.HTTPError):
            answer = httpx.post(url, json=ask, timeout=start_s)
            said = f"; {answer.status_code}: {answer.text}"
            if answer.is_success:
                return
        time.sleep(0.2)
    why = f"does not answer after {start_s:g} s" if process.poll() is None else "ended"
    told = log.read_text(errors="replace")[-_SAID:].strip() + said[:_SAID]
    raise ConfigError(f"the server {why}: {told}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the server's whole session; kill what does not end."""
    for number, wait_s in ((signal.SIGTERM, _STOP_S), (signal.SIGKILL, _STOP_S)):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(wait_s)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
