"""Limits of the operating system on connections: open files and local ports."""

from __future__ import annotations

import errno
import resource

from srm.errors import ConfigError
from srm.loadtest.scenario import Scenario

_SPARE_FILES = 64
"""Open files that a process needs besides connections."""
_EXHAUSTED = {
    errno.EMFILE: "open files a process (RLIMIT_NOFILE)",
    errno.ENFILE: "open files of the machine (fs.file-max)",
    errno.EADDRNOTAVAIL: "local ports (net.ipv4.ip_local_port_range)",
    errno.ENOBUFS: "memory of sockets",
    errno.ENOMEM: "memory of sockets",
}
"""Resources that this machine, not the server, can run out of when it opens a connection."""


def own_concurrency(scenario: Scenario, worker: int, workers: int) -> int:
    """Return one process's share of a closed loop's concurrent requests."""
    total = 1 if scenario.arrivals == "synchronous" else scenario.concurrency
    return total // workers + (worker < total % workers)


def allow_files(scenario: Scenario, worker: int, workers: int) -> None:
    """Raise this process's limit of open files to the hard limit.

    Raises ConfigError if a closed loop needs more; an open loop's need shows during the run.
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
    """Return the error to report if a connection failed for lack of local resources, else None."""
    if error.errno not in _EXHAUSTED:
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return ConfigError(
        f"this machine is out of {_EXHAUSTED[error.errno]} with {connections} connections "
        f"of client process {worker}, which may open {soft} files: allow more, or use "
        "less concurrency, a lower rate or more workers"
    )
