"""The sockets that a server listens on, and what others reach them by."""

from __future__ import annotations

import errno
import os
import socket
from contextlib import suppress
from pathlib import Path

from srm.errors import ConfigError
from srm.server.config import ServerConfig


def listen_as(config: ServerConfig) -> socket.socket:
    """Open the socket that clients connect to. Raises ConfigError as `listen`."""
    if not config.uds:
        return listen(config.host, config.port)
    path, listener = Path(config.uds), socket.socket(socket.AF_UNIX)
    try:
        if path.is_socket() and not _is_listened_on(path):
            path.unlink()  # of a server that was killed
        listener.bind(config.uds)
        listener.listen(2048)
    except (OSError, ValueError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"uds = {config.uds!r}: cannot listen: {reason}") from None
    return listener


def remove_same(path: Path, made: os.stat_result) -> None:
    """Remove a file that was made here, unless another one is in its place."""
    with suppress(FileNotFoundError):
        if os.path.samestat(path.stat(), made):
            path.unlink()


def _is_listened_on(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket. Raises ConfigError if that fails, as when the port is in use."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno == errno.EADDRINUSE:
            other = port + 10 if port < 60_000 else port - 10  # the next one may be admin_port
            reason += f"; take another, with --port {other} or PORT={other} make serve"
        raise ConfigError(f"host = {host!r}, port = {port}: cannot listen: {reason}") from None


def url_of(host: str, listener: socket.socket) -> str:
    """Return the URL at which programs on this machine reach a socket that listens on `host`."""
    port = listener.getsockname()[1]
    host = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
