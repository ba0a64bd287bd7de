"""Runs servers in processes of their own: `srm serve` as a user starts it, and any other."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

import httpx

from srm.errors import ConfigError
from srm.loadtest.records import ROOT

_STOP_S = 20.0
_SERVE = """import sys; from srm.server.supervise.launch import main
sys.exit(main(sys.argv[2:], engine_module=sys.argv[1]))"""
_SHOWN = 600
"""Number of characters of a server's log that an error message shows."""


def free_port() -> int:
    """Return a currently free port of the loopback interface."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


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
        log.open("wb") as log_file,
        subprocess.Popen(
            command,
            cwd=log.parent,
            env=dict(variables),
            stdout=log_file,
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
    deadline, output = time.monotonic() + start_s, ""
    while time.monotonic() < deadline and process.poll() is None:
        with suppress(httpx.HTTPError):
            answer = httpx.post(url, json=ask, timeout=start_s)
            output = f"; {answer.status_code}: {answer.text}"
            if answer.is_success:
                return
        time.sleep(0.2)
    why = f"does not answer after {start_s:g} s" if process.poll() is None else "ended"
    reported = log.read_text(errors="replace")[-_SHOWN:].strip() + output[:_SHOWN]
    raise ConfigError(f"the server {why}: {reported}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the server's whole session; kill what does not end."""
    for number, wait_s in ((signal.SIGTERM, _STOP_S), (signal.SIGKILL, _STOP_S)):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(wait_s)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


class Serving(NamedTuple):
    """A server that is ready."""

    pid: int
    host: str
    port: int

    @property
    def url(self) -> str:
        """Base URL of the server."""
        return f"http://{self.host}:{self.port}"


@contextmanager
def serving(
    *flags: str,
    engine_module: str = "srm.engine",
    root: Path = ROOT,
    log: int | IO[Any] = subprocess.DEVNULL,
) -> Iterator[Serving]:
    """Start `srm serve` with these flags; stop it at the end. Raises ConfigError if that fails.

    `python -m engine_module` is its engine, `root` has its source tree, and `log` gets its log.
    """
    serve = _SERVE
    if not (root / "srm").is_dir():  # a tree before 0.3, whose folders are the packages
        serve, engine_module = serve.replace("srm.", ""), engine_module.removeprefix("srm.")
    places = (str(root), *os.environ.get("PYTHONPATH", "").split(os.pathsep))
    with subprocess.Popen(
        [sys.executable, "-P", "-c", serve, engine_module, *flags, "--port=0"],
        cwd=root,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places))},
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if match := re.match(r"Serving \S+ on http://([^:]+):(\d+)", line):
                    yield Serving(process.pid, match[1], int(match[2]))
                    break
            else:
                raise ConfigError(f"`srm serve {' '.join(flags)}` did not start")
        finally:
            process.terminate()
