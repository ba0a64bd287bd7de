"""A server of a model folder that lives as long as a block."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from srm.errors import SRMError

START_S = 1_800.0
"""Seconds that a start may take; a new architecture is compiled in it."""
_STOP_S = 60.0


@contextmanager
def served(model: Path, *flags: str) -> Iterator[str]:
    """Serve a folder on this machine alone and yield the server's address. Raises SRMError if it
    does not start; it says why on standard error."""
    port = free_port()
    command = [sys.executable, "-m", "srm", "serve", str(model), f"--port={port}", *flags]
    with subprocess.Popen([*command, "--log-level=warning"], stdout=sys.stderr) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(process, url)
            yield url
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()


def free_port() -> int:
    """Return a port of this machine that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port


def _wait(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if (code := process.poll()) is not None:
            raise SRMError(f"the server of model ended with code {code}")
        try:
            if httpx.get(f"{url}/ready", timeout=5).is_success:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    raise SRMError(f"the server of model is not ready after {START_S:g} s")
