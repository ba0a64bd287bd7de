"""Runs servers in processes of their own, `srm serve` as a user starts it among them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from engine.errors import ConfigError
from engine.records import ROOT

_START = (
    "import sys; from server.supervise.launch import main; "
    "sys.exit(main(sys.argv[2:], sys.argv[1]))"
)


class Serving(NamedTuple):
    """A server that is ready."""

    pid: int
    host: str
    port: int

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http://{self.host}:{self.port}"


@contextmanager
def serving(
    *flags: str, engine_module: str = "engine", program: tuple[str, ...] = ()
) -> Iterator[Serving]:
    """Start a server with these flags, and stop it at the end. Raises ConfigError if that fails.

    It is `srm serve` with that engine, or a Python program which says as it does where it serves.
    """
    with subprocess.Popen(
        [sys.executable, "-P", *(program or ("-c", _START, engine_module)), *flags, "--port=0"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if found := re.match(r"Serving \S+ on http://([^:]+):(\d+)", line):
                    yield Serving(process.pid, found[1], int(found[2]))
                    break
            else:
                raise ConfigError(f"`srm serve {' '.join(flags)}` did not start")
        finally:
            process.terminate()
