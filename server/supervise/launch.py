"""`srm serve`: engine, API processes and the process that runs batches, supervised.

Owns what they share on this machine: the listening socket, files in memory (metrics, heartbeats),
and the settings of all as one flat set of flags, of which each is passed its own. Works from any
folder.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import shlex
import socket
import sys
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec

import srm
from srm import logs, metrics_memory
from srm.cores import available_cores
from srm.engine.config import EngineConfig, read_model_config
from srm.engine.process.watchdog import Heartbeat
from srm.engine.wiring import EngineWiring
from srm.errors import UNDECODABLE, ConfigError
from srm.files import read_file
from srm.metrics_memory import Region
from srm.server.config import ServerConfig, within_open_files
from srm.server.http.keys import VARIABLE, check_limits, load_keys
from srm.server.http.listeners import listen, listen_as, remove_same, url_of
from srm.server.loop_turns import LOOP_TIMEOUT_S
from srm.server.model_identity import model_id
from srm.server.supervise.own_folder import COPIES, keep_first, own_folder
from srm.server.supervise.supervisor import Child, Supervisor
from srm.server.text.tokenizer_files import report_unread
from srm.server.wiring import ServerWiring
from srm.settings import Command, build, read_settings

log = logging.getLogger(__name__)

_ROOT = Path(srm.__file__).resolve().parents[1]
QUESTION = "Question: Ava has 6 boxes with 7 pears each. How many pears is that in all?\nAnswer:"
"""The README's prompt."""
SHOW_LAST = (
    " | python3 -c 'import json, sys; r = json.load(sys.stdin); "
    """print(r.get("error") or r["choices"][-1]["text"], r.get("samples", ""))'"""
)
"""Shell command that prints a reply's last choice, with which `until` ended, and its counts."""
EXAMPLE = "example.json"
"""Name of the file in which a model's folder says what to ask it first: a body of
`POST /v1/completions`."""
MOST_EXAMPLE = 16_384
"""Most bytes of it."""
_MOST_BY_DEFAULT, _MOST_OF_AN_ENGINE = 8, 4
"""API processes, whatever the number of cores; the larger of both counts."""
FLAGS_OF_VLLM = {
    "--max-num-seqs": "--num-slots, sequences that run, and --max-step-rows, those of a step",
    "--max-num-batched-tokens": "--max-step-tokens",
    "--gpu-memory-utilization": "--memory-fraction",
    "--data-parallel-size": "--engines, or --devices",
    "--tensor-parallel-size": "not needed: a model fits one GPU; --engines uses several",
    "--pipeline-parallel-size": "not needed: a model fits one GPU; --engines uses several",
    "--max-model-len": "not a setting: the model's n_ctx",
    "--enable-prefix-caching": "--prefix-cache, which is on",
    "--no-enable-prefix-caching": "--prefix-cache=false",
    "--enable-chunked-prefill": "not a setting: prompts are always fed in chunks",
    "--api-key": "the variable SRM_API_KEYS, or --api-keys-file",
    "--api-server-count": "--api-processes",
    "--enforce-eager": "not a setting: a graph is compiled once and kept in --cache-dir",
    "--trust-remote-code": "not a setting: no code of a model's folder is run",
    "--tokenizer": "tokenizer.json in the model's folder",
    "--uvicorn-log-level": "--log-level",
}
"""What does the same here, for who comes from there."""
_MARGIN_S = 5.0
"""Seconds beyond `step_timeout_s` that an engine may be silent before it is taken for frozen."""

Wiring = TypeVar("Wiring", bound=msgspec.Struct)


def main(argv: list[str], engine_module: str = "srm.engine") -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code. Raises ConfigError.

    The engine is started as `python -m engine_module` with the flags of EngineWiring.
    """
    server, engine = load_settings(argv)
    logs.configure(server.log_level, server.log_format)
    server = within_open_files(server)  # and said once
    check_limits(server, load_keys(server.api_keys_file, os.environ))  # before anything is started
    read_model_config(server.model)  # and said once
    report_unread(server.model, server.sampling_defaults)
    example = read_example(server.model)
    check_writable("data_dir", server.data_folder)
    if engine.snapshot_dir:
        check_writable("snapshot_dir", Path(engine.snapshot_dir).expanduser())
    with ExitStack() as opened:
        listener = opened.enter_context(listen_as(server))
        if server.uds:
            opened.callback(remove_same, Path(server.uds), Path(server.uds).stat())
        listeners = [listener]
        if server.admin_port:
            listeners.append(opened.enter_context(listen(server.admin_host, server.admin_port)))
        own = opened.enter_context(own_folder(server.data_folder))
        supervisor = _supervisor(
            _with_model(server, own / COPIES, example),
            wired(EngineWiring, engine, weights_copies=str(own / COPIES)),
            engine_module,
            listeners,
        )
        url = "http://localhost" if server.uds else url_of(server.host, listener)
        page = url_of(server.admin_host, listeners[-1]) if server.admin_port else url
        asked = example or usual_example(server.model)
        say = partial(announce, server.model_name, url, page, asked, server.uds)
        return asyncio.run(supervisor.run(say))


def read_example(model: Path) -> dict[str, Any]:
    """Return the folder's own request to send first; empty without one. An `example.json` that is
    no small JSON object is told, and left out."""
    path = model / EXAMPLE
    if path.exists():
        try:
            return msgspec.json.decode(read_file(path, MOST_EXAMPLE), type=dict[str, Any])
        except (OSError, *UNDECODABLE) as error:
            log.warning("%s is no JSON object of 16 KiB (%s): a usual one is shown", path, error)
    return {}


def usual_example(model: Path) -> dict[str, Any]:
    """Return what to send to a model whose folder does not say it."""
    prompt = QUESTION if (model / "tokenizer.json").exists() else [0]
    return {"prompt": prompt, "max_tokens": 32, "temperature": 0}


def printable(fields: dict[str, Any]) -> str:
    """Return the fields as JSON in one line. What the output cannot encode, or would move a
    terminal's cursor, is escaped."""
    text = json.dumps(fields, ensure_ascii=False)
    try:
        text.encode(sys.stdout.encoding or "ascii")
        is_shown = text.isprintable()
    except UnicodeEncodeError:
        is_shown = False
    return text if is_shown else json.dumps(fields).replace("\x7f", "\\u007f")


def wired(kind: type[Wiring], config: msgspec.Struct, **own: Any) -> Wiring:
    """Return the settings with `own`, as what has more fields than they."""
    return kind(**(msgspec.structs.asdict(config) | own))


def _with_model(server: ServerConfig, copies: Path, example: dict[str, Any]) -> ServerWiring:
    """Return the settings with what they say of the model as it is now, whatever becomes of it."""
    return wired(
        ServerWiring,
        server,
        model_id=model_id(server.model),
        served_model_name=server.model_name,
        data_dir=str(server.data_folder),
        kept_model=str(keep_first(server.model, copies) or ""),
        example=json.dumps(example) if example else "",
    )


def _supervisor(
    server: ServerWiring,
    engine: EngineWiring,
    engine_module: str,
    listeners: list[socket.socket],
) -> Supervisor:
    numbers = range(server.engines)
    num_apis = server.api_processes or count_api_processes(server.engines)
    # Only where there are several engines are they told from each other.
    labels = [str(number) if server.engines > 1 else "" for number in numbers]
    regions = metrics_memory.create([*labels, *("" for _ in range(num_apis + 1))])
    of_engines, of_apis = regions[: len(numbers)], regions[len(numbers) : -1]
    endpoints = [new_endpoint() for _ in numbers]
    why_no_jobs = os.memfd_create("srm-why-no-jobs")
    server = msgspec.structs.replace(
        server,
        api_processes=num_apis,
        endpoint=",".join(endpoints),
        listen_fd=listeners[0].fileno(),
        admin_fd=listeners[1].fileno() if server.admin_port else -1,
        limits_fd=os.memfd_create("srm-limits"),
        why_no_jobs_fd=why_no_jobs,
    )
    snapshots = engine.snapshot_dir or str(server.data_folder / "snapshots")
    engine = msgspec.structs.replace(engine, snapshot_dir=snapshots)
    environment = child_environment()
    without_keys = {name: value for name, value in environment.items() if name != VARIABLE}
    # Millions of lines pass through several threads: with memory of its own for each, none is ever
    # given back.
    frugal = {**without_keys, "MALLOC_ARENA_MAX": "1"}
    shared = (server.limits_fd, why_no_jobs)
    child = partial(_child, server)
    return Supervisor(
        engines=_engines(server, engine, engine_module, without_keys, of_engines),
        apis=[
            child("api", f"api {number}", environment, region, listeners=listeners, fds=shared)
            for number, region in enumerate(of_apis)
        ],
        drain_s=server.drain_s,
        others=[child("jobs", "jobs", frugal, regions[-1], why_away_fd=why_no_jobs)],
        snapshot_s=engine.snapshot_s,
        passes_hangups=bool(server.api_keys_file),
    )


def new_endpoint() -> str:
    """Return an address that nobody else knows, of a socket that no folder has."""
    return f"ipc://@srm-{secrets.token_hex(16)}"


def new_heartbeat() -> int:
    """Make the memory of a process's heartbeat."""
    fd = os.memfd_create("srm-heartbeat")
    os.ftruncate(fd, Heartbeat.BYTES)
    return fd


def count_api_processes(num_engines: int) -> int:
    """Return one for every four cores: a GPU's engine needs one or two, and a CPU's all it gets.
    What streams an engine's tokens one by one takes up to four (docs/operations.md)."""
    most = max(_MOST_BY_DEFAULT, _MOST_OF_AN_ENGINE * num_engines)
    return min(max(1, available_cores() // 4), most)


def _child(
    config: ServerWiring,
    command: str,
    name: str,
    environment: dict[str, str],
    metrics: Region,
    **own: Any,
) -> Child:
    """Return a process that is ended when its event loop does not turn."""
    settings = msgspec.structs.replace(config, heartbeat_fd=new_heartbeat())
    return Child(
        *(name, python_module("srm.server", settings, command), environment, metrics),
        heartbeat_fd=settings.heartbeat_fd,
        silence_s=LOOP_TIMEOUT_S,
        works_in_time=True,
        folders=(Path(tempfile.gettempdir()), config.data_folder),
        **own,
    )


def _engines(
    server: ServerWiring,
    config: EngineWiring,
    module: str,
    environment: dict[str, str],
    regions: list[Region],
) -> list[Child]:
    """Return the engines, which all have the same weights, and the same note of them."""
    # The engine detects a hanging step itself, first, and says where.
    silence_s = config.step_timeout_s and config.step_timeout_s + _MARGIN_S
    engines, endpoints = [], server.endpoint.split(",")
    pause, note = os.memfd_create("srm-pause"), os.memfd_create("srm-weights")
    config = msgspec.structs.replace(config, pause_fd=pause, weights_note_fd=note)
    for number, (endpoint, metrics) in enumerate(zip(endpoints, regions, strict=True)):
        name = "engine" if len(endpoints) == 1 else f"engine {number}"
        own = {"endpoint": endpoint, "heartbeat_fd": new_heartbeat()}
        settings = msgspec.structs.replace(config, **_part(config, number, len(endpoints)), **own)
        command, fds = python_module(module, settings), (pause, note)
        engine = Child(name, command, environment, metrics, fds=fds)
        engine.heartbeat_fd = settings.heartbeat_fd
        engine.silence_s, engine.stall_s = silence_s, server.stall_s
        engine.folders = (Path(tempfile.gettempdir()), Path(config.snapshot_dir).expanduser())
        engines.append(engine)
    for engine in engines:
        engine.substitutes = [other for other in engines if other is not engine]
    return engines


def _part(config: EngineWiring, number: int, count: int) -> dict[str, object]:
    """Return what one of several engines has of the devices, and of the folder of snapshots."""
    if count == 1:
        return {}
    folder = Path(config.snapshot_dir) / f"engine-{number}" if number else config.snapshot_dir
    part: dict[str, object] = {"snapshot_dir": str(folder)}
    if not config.on_gpu:
        return part | {"memory_fraction": config.memory_fraction / count}
    return part | {"devices": ((*config.devices, *range(count))[number],)}


def python_module(module: str, config: msgspec.Struct, *arguments: str) -> list[str]:
    """Return the command that runs one of our modules with these settings."""
    # -P: a folder of the module's name in the working directory is not ours
    return [sys.executable, "-P", "-m", module, *arguments, *flags(config)]


def child_environment() -> dict[str, str]:
    """Return the environment of our processes."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")])),
    }


def load_settings(argv: list[str]) -> tuple[ServerConfig, EngineConfig]:
    """Read both structs from one set of sources. Raises ConfigError for a setting of neither."""
    command = Command(
        "srm serve",
        "Answer OpenAI-style requests over HTTP.",
        "srm serve demo --port 8000",
        "model device dtype host port served_model_name num_slots engines api_keys_file admin_port "
        "data_dir log_level",
        positional="model",
        elsewhere=FLAGS_OF_VLLM,
        variables=None,
    )
    settings = read_settings((EngineConfig, ServerConfig), argv, command)
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


def check_writable(name: str, folder: Path) -> None:
    """Raise ConfigError if the folder cannot be written into, or cannot be made."""
    try:
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    except OSError as error:  # a folder above may not be entered
        raise ConfigError(f"{name} = {folder}: {error.strerror}") from None
    if not there.is_dir():
        raise ConfigError(f"{name} = {folder}: {there} is no folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"{name} = {folder}: {there} cannot be written into")


async def announce(
    model_name: str, url: str, page: str, example: dict[str, Any], uds: str = ""
) -> None:
    """Print where and how to send a request, once the server is ready."""
    while not await _is_ready(url, uds):
        await asyncio.sleep(0.1)
    to = f"--unix-socket {shlex.quote(uds)} {url}" if uds else url
    is_long = "until" in example and not {"return", "stream"} & example.keys()
    sys.stdout.write(
        f"Serving {model_name} on {uds or url}\n"
        f"  curl {'-sS ' * is_long}{to}/v1/completions -H 'Content-Type: application/json' "
        f"-d {shlex.quote(printable(example))}{SHOW_LAST * is_long}\n"
    )
    if page != url or not uds:  # a browser opens no socket
        sys.stdout.write(f"Dashboard and playground: {page}/   API reference: {url}/docs\n")
    sys.stdout.flush()


async def _is_ready(url: str, uds: str) -> bool:
    parts = urlsplit(url)
    reader, writer = await (
        asyncio.open_unix_connection(uds)
        if uds
        else asyncio.open_connection(parts.hostname or "", parts.port or 0)
    )
    try:
        writer.write(b"GET /ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        return b" 200 " in await reader.readline()
    except OSError:  # the API process crashed: its successor will answer
        return False
    finally:
        writer.close()
