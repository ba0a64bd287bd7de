"""Runs buildah and podman where there is no Docker: one command, or a container of the server."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

HARDENED = (
    *("--read-only", "--tmpfs", "/tmp", "--cap-drop", "all"),
    *("--security-opt", "no-new-privileges", "--shm-size", "64k"),
)
"""How the image must be able to run."""
CONTAINERS_CONF = """\
[containers]
default_ulimits = ["nofile=4096:4096", "nproc=8192:8192"]
log_driver = "k8s-file"
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
compat_api_enforce_docker_hub = false
"""
"""Runs containers without systemd and without CAP_SYS_RESOURCE."""
READY_S = 900.0
"""How long a server may take to be ready: it may have to compile, on a busy machine."""


class CheckFailed(Exception):
    """The image or a program failed a check."""


def demand(is_so: bool, otherwise: str) -> None:
    """Raise CheckFailed, which says what is otherwise, unless it is so."""
    if not is_so:
        raise CheckFailed(otherwise)


def run(
    *command: str,
    timeout_s: float = 120,
    can_fail: bool = False,
    environment: Mapping[str, str] | None = None,
) -> str:
    """Run a command and return all that it said. Raises CheckFailed if it fails or takes too long.

    Its output goes to a file: a pipe would be held open by podman's monitor, which stays.
    """
    with tempfile.TemporaryFile() as captured:
        try:
            code = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=captured,
                stderr=subprocess.STDOUT,
                timeout=timeout_s,
                env={**os.environ, **(environment or {})},
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            raise CheckFailed(f"{' '.join(command)}: not done after {timeout_s:g} s") from None
        captured.seek(0)
        text = captured.read().decode(errors="replace")
    demand(can_fail or code == 0, f"{' '.join(command)}: exit {code}\n{text[-3000:]}")
    return text


def inspect(kind: str, name: str) -> dict[str, Any]:
    """Return what `podman KIND inspect NAME` knows."""
    # Podman's warnings come before the document, on another stream.
    text = run("podman", kind, "inspect", name)
    (facts,) = json.loads(text[text.index("[\n") :])
    return dict(facts)


def free_port() -> int:
    """Return a port of the loopback interface that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Container:
    """`srm serve` in a container that is hardened, ready when it is made, and gone afterwards."""

    def __init__(self, name: str, image: str, *options: str) -> None:
        self.name, self.port = name, free_port()
        published = ("--publish", f"127.0.0.1:{self.port}:8000")
        run("podman", "run", "--detach", "--name", name, *published, *HARDENED, *options, image)
        try:
            wait_until_ready(self.port, lambda: self.is_running)
        except CheckFailed as error:
            log = self.log
            self.__exit__(None, None, None)
            raise CheckFailed(f"{error}\n{log[-3000:]}") from None

    def __enter__(self) -> Container:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        run("podman", "rm", "--force", "--time", "1", "--volumes", self.name, can_fail=True)

    @property
    def is_running(self) -> bool:
        return bool(inspect("container", self.name)["State"]["Running"])

    @property
    def log(self) -> str:
        return run("podman", "logs", self.name, can_fail=True)

    @property
    def processor_s(self) -> float:
        """Seconds of one processor that all of its processes took so far, by its control group."""
        first, second = "/sys/fs/cgroup/cpuacct/cpuacct.usage", "/sys/fs/cgroup/cpu.stat"
        output = self.execute("sh", "-c", f"cat {first} 2>/dev/null || cat {second}").split()
        return int(output[0]) / 1e9 if len(output) == 1 else int(output[1]) / 1e6

    def execute(self, *command: str) -> str:
        """Run a command in the container and return what it said."""
        return run("podman", "exec", self.name, *command)

    def children(self, argument: str) -> list[int]:
        """Return the processes, by their numbers outside, whose command line has this in it."""
        first = Path("/proc") / str(inspect("container", self.name)["State"]["Pid"])
        pids = [int(word) for word in (first / f"task/{first.name}/children").read_text().split()]
        return [pid for pid in pids if argument in Path(f"/proc/{pid}/cmdline").read_text()]

    def stop(self, timeout_s: float) -> int:
        """Send SIGTERM; return the exit code."""
        stop = ("podman", "stop", "--time", f"{timeout_s:.0f}", self.name)
        run(*stop, timeout_s=timeout_s + 60)
        return int(inspect("container", self.name)["State"]["ExitCode"])


def wait_until_ready(port: int, is_running: Callable[[], bool]) -> None:
    """Wait until /ready answers 200. Raises CheckFailed if the server ends or takes too long."""
    deadline, asked = time.monotonic() + READY_S, 0
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        try:
            connection.request("GET", "/ready")
            if connection.getresponse().status == http.HTTPStatus.OK:
                return
        except (OSError, http.client.HTTPException):
            pass
        finally:
            connection.close()
        asked += 1
        demand(
            asked % 20 > 0 or is_running(), "the server has ended"
        )  # asking podman takes a while
        demand(time.monotonic() < deadline, f"the server is not ready after {READY_S:g} s")
        time.sleep(0.05)
