"""`srm serve`: engine, API processes and the process that runs batches, supervised.

Owns what they share on this machine: the listening socket, a private folder (metrics, engine
socket), and the settings of all as one flat set of flags, of which each is passed its own. Works
from any folder.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from engine import logs
from engine.config import EngineConfig
from engine.cores import available_cores
from engine.errors import ConfigError
from engine.settings import build, read_settings
from server.config import ServerConfig
from server.http.keys import VARIABLE, load_keys, read_key
from server.http.limits import check_limits, memory
from server.model_identity import model_id
from server.supervise.supervisor import Child, Supervisor
from server.text.text import read_model_config

_ROOT = Path(__file__).resolve().parents[2]
_PRIVATE = frozenset(
    {
        *("endpoint", "listen_fd", "admin_fd", "limits_fd", "heartbeat", "max_slots"),
        *("weights_note", "model_id", "why_no_jobs"),
    }
)
"""Settings of the children that are set here and cannot be given."""
QUESTION = '"Question: Ava has 6 boxes with 7 pears each. How many pears is that in all?\\nAnswer:"'
"""The README's prompt, as JSON: the bundled model knows the answer."""
_MOST_BY_DEFAULT = 8
"""API processes, whatever the number of cores."""
_MARGIN_S = 5.0
"""Seconds beyond `step_timeout_s` that an engine may be silent before it is taken for frozen."""


def main(argv: list[str], engine_module: str = "engine") -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code. Raises ConfigError.

    The engine is started as `python -m engine_module` with the flags of EngineConfig.
    """
    server, engine = load_settings(argv)
    logs.configure(server.log_level, server.log_format)
    check_limits(server, load_keys(server.api_keys_file, os.environ))  # before anything is started
    read_key(server.batch_worker_key_file)
    read_model_config(server.model)  # and said once
    check_writable("data_dir", server.data_folder)
    if engine.snapshot_dir:
        check_writable("snapshot_dir", Path(engine.snapshot_dir).expanduser())
    with ExitStack() as opened:
        listener = opened.enter_context(listen(server.host, server.port))
        listeners = [listener]
        if server.admin_port:
            admin = opened.enter_context(listen(server.admin_host, server.admin_port))
            server = msgspec.structs.replace(server, admin_fd=admin.fileno())
            listeners.append(admin)
        folder = opened.enter_context(tempfile.TemporaryDirectory(prefix="srm-"))
        supervisor = _supervisor(server, engine, engine_module, listeners, Path(folder))
        prompt = QUESTION if (server.model / "tokenizer.json").exists() else "[0]"
        url = url_of(server.host, listener)
        page = url_of(server.admin_host, listeners[-1]) if server.admin_port else url
        meanwhile = announce(server.model_name, url, page, prompt)
        return asyncio.run(supervisor.run(meanwhile))


def _supervisor(
    server: ServerConfig,
    engine: EngineConfig,
    engine_module: str,
    listeners: list[socket.socket],
    folder: Path,
) -> Supervisor:
    metrics = folder / "metrics"
    metrics.mkdir()
    numbers = range(server.engines)
    endpoints = [f"ipc://{folder}/engine{number or ''}" for number in numbers]
    why_no_jobs = folder / "why_no_jobs"
    server = msgspec.structs.replace(
        server,
        endpoint=",".join(endpoints),
        listen_fd=listeners[0].fileno(),
        limits_fd=memory(),
        model_id=model_id(server.model),
        why_no_jobs=str(why_no_jobs),
    )
    engine = msgspec.structs.replace(
        engine,
        weights_note=str(folder / "weights"),
        snapshot_dir=engine.snapshot_dir or str(server.data_folder / "snapshots"),
    )
    environment = child_environment(metrics)
    without_keys = {name: value for name, value in environment.items() if name != VARIABLE}
    # Millions of lines pass through several threads: with memory of its own for each, none is ever
    # given back.
    frugal = {**without_keys, "MALLOC_ARENA_MAX": "1"}
    api, jobs = (python_module("server", server, name) for name in ("api", "jobs"))
    engines = [
        _engine(engine, engine_module, number, endpoints, without_keys) for number in numbers
    ]
    for one in engines:
        one.substitutes = [other for other in engines if other is not one]
    return Supervisor(
        engines=engines,
        apis=[
            Child(f"api {number}", api, environment, metrics, listeners, fds=(server.limits_fd,))
            for number in range(server.api_processes or _default_api_processes())
        ],
        drain_s=server.drain_s,
        others=[Child("jobs", jobs, frugal, metrics, why_away=why_no_jobs)],
        snapshot_s=engine.snapshot_s,
        passes_hangups=bool(server.api_keys_file),
    )


def _default_api_processes() -> int:
    """Return one for every four cores: a GPU's engine needs one or two, and a CPU's all it gets."""
    return min(max(1, available_cores() // 4), _MOST_BY_DEFAULT)


def _engine(
    config: EngineConfig,
    module: str,
    number: int,
    endpoints: list[str],
    environment: dict[str, str],
) -> Child:
    """Return one of the engines, which all have the same weights, and the same note of them."""
    name, metrics = "engine", Path(environment["PROMETHEUS_MULTIPROC_DIR"])
    heartbeat = metrics.parent / f"heartbeat{number or ''}"
    own: dict[str, object] = {"endpoint": endpoints[number], "heartbeat": str(heartbeat)}
    if len(endpoints) > 1:
        name, metrics = f"engine {number}", metrics / f"engine-{number}"
        metrics.mkdir()
        environment = {**environment, "PROMETHEUS_MULTIPROC_DIR": str(metrics)}
        if number:
            own["snapshot_dir"] = str(Path(config.snapshot_dir) / f"engine-{number}")
        if config.device == "cpu":
            own["memory_fraction"] = config.memory_fraction / len(endpoints)
        else:
            own["devices"] = ((*config.devices, *range(len(endpoints)))[number],)
    config = msgspec.structs.replace(config, **own)
    # The engine detects a hanging step itself, first, and says where.
    silence_s = config.step_timeout_s and config.step_timeout_s + _MARGIN_S
    command = python_module(module, config)
    return Child(name, command, environment, metrics, heartbeat=heartbeat, silence_s=silence_s)


def python_module(module: str, config: msgspec.Struct, *arguments: str) -> list[str]:
    """Return the command that runs one of our modules with these settings."""
    # -P: a folder of the module's name in the working directory is not ours
    return [sys.executable, "-P", "-m", module, *arguments, *flags(config)]


def child_environment(metrics: Path) -> dict[str, str]:
    """Return the environment of our processes, which leave their metrics in the folder."""
    return {
        **os.environ,
        "PROMETHEUS_MULTIPROC_DIR": str(metrics),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")])),
    }


def load_settings(argv: list[str]) -> tuple[ServerConfig, EngineConfig]:
    """Read both structs from one set of sources. Raises ConfigError for a setting of neither."""
    settings = read_settings((EngineConfig, ServerConfig), argv, prog="srm serve", private=_PRIVATE)
    server, engine = build(ServerConfig, settings), build(EngineConfig, settings)
    count = len(engine.devices)
    if count and settings.get("engines", count) != count:
        raise ConfigError(f"engines must be {count}, one for each of devices, got {server.engines}")
    return msgspec.structs.replace(server, engines=count or server.engines), engine


def flags(config: msgspec.Struct) -> list[str]:
    """Return the settings as command-line flags."""
    return [
        f"--{name.replace('_', '-')}="
        f"{','.join(map(str, value)) if isinstance(value, tuple) else value}"
        for name, value in msgspec.structs.asdict(config).items()
    ]


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


def check_writable(name: str, folder: Path) -> None:
    """Raise ConfigError if the folder cannot be written into, or cannot be made."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise ConfigError(f"{name} = {folder}: {there} is no folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"{name} = {folder}: {there} cannot be written into")


def url_of(host: str, listener: socket.socket) -> str:
    """Return the URL at which programs on this machine reach a socket that listens on `host`."""
    port = listener.getsockname()[1]
    host = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def announce(model_name: str, url: str, page: str, prompt: str) -> None:
    """Print where and how to send a request, once the server is ready."""
    parts = urlsplit(url)
    while not await _is_ready(parts.hostname or "", parts.port or 0):
        await asyncio.sleep(0.1)
    sys.stdout.write(
        f"Serving {model_name} on {url}\n"
        f"  curl {url}/v1/completions -H 'Content-Type: application/json' "
        f"""-d '{{"prompt": {prompt}, "max_tokens": 32, "temperature": 0}}'\n"""
        f"A page to watch and try it: {page}/   what may be asked: {url}/docs\n"
    )
    sys.stdout.flush()


async def _is_ready(host: str, port: int) -> bool:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(b"GET /ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        return b" 200 " in await reader.readline()
    except OSError:  # the API process crashed: its successor will answer
        return False
    finally:
        writer.close()
