"""What the operating system must allow for connections: open files and local ports.

Knows nothing of requests.
"""

from __future__ import annotations

import errno
import resource

from engine.errors import ConfigError
from loadtest.scenario import Scenario

_SPARE_FILES = 64
"""Beside connections."""
_EXHAUSTED = {
    errno.EMFILE: "open files a process (RLIMIT_NOFILE)",
    errno.ENFILE: "open files of the machine (fs.file-max)",
    errno.EADDRNOTAVAIL: "local ports (net.ipv4.ip_local_port_range)",
    errno.ENOBUFS: "memory of sockets",
    errno.ENOMEM: "memory of sockets",
}
"""What this machine, and not the server, can lack for one more connection."""


def own_concurrency(scenario: Scenario, worker: int, workers: int) -> int:
    """Of a closed loop's requests under way, those of one process."""
    total = 1 if scenario.arrivals == "synchronous" else scenario.concurrency
    return total // workers + (worker < total % workers)


def allow_files(scenario: Scenario, worker: int, workers: int) -> None:
    """Let this process open as many files as the OS lets it.

    Raises ConfigError if a closed loop needs more; an open loop's need shows on the way.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    need = _SPARE_FILES + (0 if scenario.open_loop else own_concurrency(scenario, worker, workers))
    if need > hard != resource.RLIM_INFINITY:
        raise ConfigError(
            f"concurrency = {scenario.concurrency} with workers = {workers} needs {need} open "
            f"files in a process, and the OS allows {hard} (ulimit -Hn): allow more, or use at "
            f"least {-(-scenario.concurrency // max(hard - _SPARE_FILES, 1))} workers"
        )


def exhausted(error: OSError, worker: int, connections: int) -> ConfigError | None:
    """What to say if a connection failed for lack of something here; None if it did not."""
    if error.errno not in _EXHAUSTED:
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return ConfigError(
        f"this machine is out of {_EXHAUSTED[error.errno]} with {connections} connections "
        f"of client process {worker}, which may open {soft} files: allow more, or use "
        "less concurrency, a lower rate or more workers"
    )
