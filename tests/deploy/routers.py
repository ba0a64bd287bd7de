"""A router of others in front of real servers, on loopback, with the arguments that we deploy."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import httpx

from deploy.kubernetes.manifests import objects_of
from tests.kit.serving import ROOT, free_port

DEPLOYED = ROOT / "deploy" / "kubernetes" / "router" / "router.yml"
_START_S = 120


class Kind(NamedTuple):
    """How one of the routers is started and told of another worker."""

    module: str
    flags: tuple[str, ...]
    add: tuple[str, str]
    """Method-less path and the name of the parameter, of the query or of a body of JSON."""


def deployed_flags() -> tuple[str, ...]:
    """Return the arguments of the Deployment but for addresses and the discovery of pods."""
    (deployment, *_) = objects_of(DEPLOYED.read_text())
    arguments: list[str] = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    left_out = ("--host", "--port", "--prometheus", "--service-discovery", "--selector")
    return tuple(
        argument
        for argument in arguments
        if argument.startswith("--") and not argument.startswith(left_out)
    )


KINDS = {
    "vllm": Kind("vllm_router.launch_router", deployed_flags(), ("/add_worker", "url")),
    "sglang": Kind("sglang_router.launch_router", deployed_flags(), ("/workers", "url")),
}


class Router:
    """A running router. Ends with SIGKILL: nothing is asked of its own end."""

    def __init__(
        self, name: str, python: Path, workers: Sequence[str], *flags: str, **variables: str
    ) -> None:
        """Wait until it has a worker. `python` has the router's package."""
        self._kind = KINDS[name]
        port, self._metrics_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # read when it fails
        self.process = subprocess.Popen(
            [
                *(str(python), "-m", self._kind.module),
                *(("--worker-urls", *workers) if workers else ()),
                *("--host=127.0.0.1", f"--port={port}", "--prometheus-host=127.0.0.1"),
                *(f"--prometheus-port={self._metrics_port}", *self._kind.flags, *flags),
            ],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **variables},
        )
        self.http = httpx.Client(base_url=self.url, timeout=120, trust_env=False)
        deadline = time.monotonic() + _START_S
        while not self._is_ready():
            assert self.process.poll() is None and time.monotonic() < deadline, self.log()
            time.sleep(0.1)

    def _is_ready(self) -> bool:
        try:
            return self.http.get("/readiness").status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    def add(self, worker: str) -> None:
        """Tell the router of another worker, as its discovery of pods would."""
        path, name = self._kind.add
        sent = {"params": {name: worker}} if path == "/add_worker" else {"json": {name: worker}}
        reply = self.http.post(path, **sent)  # type: ignore[arg-type]
        assert reply.is_success, reply.text

    def metrics(self, pattern: str) -> float:
        """Return the sum of the samples of the router's own metrics whose name has the pattern."""
        text = httpx.get(
            f"http://127.0.0.1:{self._metrics_port}/metrics", trust_env=False, timeout=60
        ).text
        matches = re.findall(rf"^\w*{pattern}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE)
        return sum(map(float, matches))

    def log(self) -> str:
        """Return what the router wrote."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def __enter__(self) -> Router:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.process.kill()
        self.process.wait()
        self.http.close()
        self._log.close()
