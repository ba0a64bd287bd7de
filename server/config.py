"""ServerConfig: how requests are received, and what becomes of files and batches.

Loaded by `srm.settings.load` like every other setting; nothing changes after loading.
"""

from __future__ import annotations

import logging
import re
import resource
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from srm.engine.config import (
    DEMO_MODEL,
    EngineConfig,
    check_utf8,
    find_model,
)
from srm.engine.messages import HEARTBEAT_S, MAX_PRIORITY
from srm.errors import ConfigError
from srm.logs import LogFormat, LogLevel
from srm.server.model_identity import digest

log = logging.getLogger(__name__)

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s]+")
"""Browser extensions and desktop programs have schemes of their own."""

_HOST = re.compile(r"(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")

_ROOT_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)*")

MAX_API_PROCESSES = 256
MAX_ENGINES = 64
SPARE_FILES = 16
"""Open files that connections leave to the rest of an API process, such as its store."""
_OWN_FILES = 24
_FILES_OF_ENGINE = 8
"""Files that an API process without connections has open, by `ls /proc/PID/fd`; and for each
engine."""
_MOST_REFUSED = 256
_DATA = Path("~/.local/share/srm")
_AT_LEAST_1 = (
    *("max_body_bytes", "max_waiting_bytes", "max_connections", "max_header_bytes"),
    *("max_file_bytes", "max_batch_lines_in_flight"),
)
_AT_LEAST_0 = (
    *("drain_s", "requests_per_minute", "tokens_per_minute", "stream_max_rate"),
    *("max_store_bytes", "max_batches", "max_batch_lines", "batch_fsync_s", "stream_keepalive_s"),
    "max_state_bytes",
)
_LEAST = dict.fromkeys(_AT_LEAST_1, 1) | dict.fromkeys(_AT_LEAST_0, 0)
SpecialNames = Literal["text", "control"]
SamplingDefaults = Literal["openai", "model"]
Config = TypeVar("Config", bound="ServerConfig")


class ServerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How requests are received."""

    model: Path = DEMO_MODEL
    """Folder with config.json and tokenizer.json; only the engine reads the weights."""
    served_model_name: str = ""
    """Name of the model in requests; empty: the folder's name."""
    chat_template: str = ""
    """File with the Jinja template of chats; empty: that of the model folder, if it has one."""
    special_tokens_in_messages: SpecialNames = "text"
    """What names of special tokens are in messages, tools and chat_template_kwargs: text, or the
    tokens (control)."""
    sampling_defaults: SamplingDefaults = "openai"
    """What requests have that leave sampling parameters out: the values of the API's tables
    (openai), or those of the model's generation_config.json (model)."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is every IPv4 address of the machine."""
    port: int = 8000
    """TCP port to listen on; 0 takes any free one."""
    uds: str = ""
    """Path of a Unix socket to listen on instead of host and port; empty: none."""
    api_processes: int = 0
    """Number of processes that answer requests on the same socket; each takes at most a core. 0:
    one for every four cores, at most 8 or four for each engine."""
    engines: int = 1
    """Number of engine processes, each with the whole model; samples of requests are spread over
    them."""
    max_body_bytes: int = 32 * 1024 * 1024
    """Largest request body, in bytes."""
    max_waiting_bytes: int = EngineConfig().max_waiting_bytes
    """Most bytes of requests that wait, and of bodies that a process holds; 503 beyond them."""
    max_connections: int = 16_384
    """Most connections to an API process; 503 beyond them."""
    max_header_bytes: int = 32 * 1024
    """Largest request line with all headers, in bytes; 431 beyond it."""
    receive_timeout_s: float = 30.0
    """Seconds that headers may take to arrive; a body has as many, and one more for each 16 KiB."""
    send_timeout_s: float = 60.0
    """Seconds without reading its reply after which a client counts as gone."""
    stream_max_rate: float = 0.0
    """Most times a second that a stream is sent new tokens; 0: no limit."""
    stream_keepalive_s: float = 15.0
    """Seconds without an event after which a stream is sent its headers and a comment; 0: it waits
    for an event."""
    api_keys_file: str = ""
    """File of the API keys that requests must have, one a line; empty: only those of
    SRM_API_KEYS."""
    requests_per_minute: float = 0.0
    """Most requests a minute with one API key; 0: no limit."""
    tokens_per_minute: float = 0.0
    """Most tokens a minute in one API key's prompts and completions over HTTP, batches excluded; 0:
    no limit."""
    priority_keys: tuple[str, ...] = ()
    """Names of API keys whose requests come before those of all others, the first before the
    second."""
    share_prompts: bool = False
    """Begin prompts from the kept states of other keys' prompts too: `cached_tokens` and time then
    tell what these were."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages may send requests, such as https://example.org; *: all."""
    allowed_hosts: tuple[str, ...] = ()
    """Names by which clients may ask a server without keys, besides addresses and localhost;
    *.NAME: all below NAME."""
    root_path: str = ""
    """Path below which a proxy has this server, such as /srm, and which it may leave on requests or
    take off; empty: none."""
    admin_port: int = 0
    """Second port, which alone then has metrics, the page and /v1/admin; 0: none."""
    admin_host: str = "127.0.0.1"
    """Address that `admin_port` listens on."""
    weights_dir: str = ""
    """Folder that other weights may be loaded from while serving; empty: any folder."""
    trainer_routes: bool = False
    """Answer the routes by which trainers pause and change weights on `port` too: to the operator's
    key, for folders in weights_dir."""
    pause_lease_s: float = 900.0
    """Seconds after which a trainer's pause ends by itself, unless it pauses or changes weights
    again."""
    otlp_endpoint: str = ""
    """URL that OpenTelemetry traces are sent to, such as http://HOST:4318/v1/traces; empty: none
    are sent."""
    data_dir: str = ""
    """Folder of files, batches and snapshots; empty: one for the model, in ~/.local/share/srm."""
    max_file_bytes: int = 8 * 1024**3
    """Largest file that may be uploaded, in bytes."""
    max_store_bytes: int = 64 * 1024**3
    """Most bytes of one API key's files after an upload, each counted as at least 4096; 0: no
    limit."""
    max_state_bytes: int = 1024**3
    """Most bytes of one API key's states and their metadata, 512 more for each; 0: no limit."""
    max_batches: int = 0
    """Most batches that one API key may have waiting or running; 0: no limit."""
    max_batch_lines: int = 0
    """Most lines of a batch's input file; 0: no limit."""
    batch_fsync_s: float = 1.0
    """Seconds that results of batches may wait to be written together; 0: they do not wait."""
    max_batch_lines_in_flight: int = 16_384
    """Most lines of all batches that are being answered; each takes some 20 KiB of memory."""
    log_level: LogLevel = EngineConfig().log_level
    """Least level of messages that are logged."""
    log_format: LogFormat = EngineConfig().log_format
    """Format of log messages: lines for people, or a JSON object each."""
    stall_s: float = 5.0
    """Seconds that an engine with work may take for a step before `/ready` answers 503."""
    drain_s: float = EngineConfig().drain_s
    """Seconds that a stop waits for running requests."""

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "model", find_model(self.model))
        for name in ("port", "admin_port"):
            if not 0 <= getattr(self, name) <= 65_535:
                raise ValueError(f"{name} must lie in 0 … 65535, got {getattr(self, name)}")
        if self.uds and (self.host, self.port) != ("127.0.0.1", 8000):
            raise ValueError(
                f"uds = {self.uds!r} is listened on instead of host and port: leave these out, got "
                f"host = {self.host!r}, port = {self.port}"
            )
        if self.admin_port and self.admin_port == self.port and not self.uds:
            raise ValueError(f"admin_port must be another than port, got {self.admin_port}")
        for name, least in _LEAST.items():
            if not getattr(self, name) >= least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        check_utf8("served_model_name", self.served_model_name)
        if self.max_waiting_bytes < self.max_body_bytes:
            raise ValueError(
                f"max_waiting_bytes must be at least max_body_bytes = {self.max_body_bytes}, "
                f"got {self.max_waiting_bytes}"
            )
        if self.trainer_routes and not self.weights_dir:
            raise ValueError(
                "weights_dir must be a folder with trainer_routes, which let a trainer change "
                "weights over the public port; it is empty"
            )
        for name in ("receive_timeout_s", "send_timeout_s", "pause_lease_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        if self.otlp_endpoint and not self.otlp_endpoint.startswith(("http://", "https://")):
            raise ValueError(
                f"otlp_endpoint must begin with http:// or https://, got {self.otlp_endpoint!r}"
            )
        if not self.stall_s >= 2 * HEARTBEAT_S:
            raise ValueError(
                f"stall_s must be at least {2 * HEARTBEAT_S:g}, got {self.stall_s}: the engine is "
                f"asked every {HEARTBEAT_S:g} s"
            )
        if not 1 <= self.engines <= MAX_ENGINES:
            raise ValueError(f"engines must be 1 … {MAX_ENGINES}, got {self.engines}")
        if not 0 <= self.api_processes <= MAX_API_PROCESSES:
            raise ValueError(
                f"api_processes must be 0 … {MAX_API_PROCESSES}, got {self.api_processes}"
            )
        if not _ROOT_PATH.fullmatch(self.root_path):
            raise ValueError(
                "root_path must be empty or a path such as /srm, of letters, digits and . _ ~ -, "
                f"without a / at its end, got {self.root_path!r}"
            )
        self._check_lists()

    def _check_lists(self) -> None:
        if len({*self.priority_keys}) != len(self.priority_keys):
            raise ValueError(f"priority_keys has a name twice: {', '.join(self.priority_keys)}")
        if len(self.priority_keys) > MAX_PRIORITY:
            raise ValueError(
                f"priority_keys must be at most {MAX_PRIORITY} names, got {len(self.priority_keys)}"
            )
        for origin in self.cors_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"cors_origins must be * or origins such as https://example.org, got {origin!r}"
                )
        for name in self.allowed_hosts:
            if not _HOST.fullmatch(name):
                raise ValueError(
                    "allowed_hosts must be names such as srm.example, without a port, or *.NAME "
                    f"for all below one; got {name!r}"
                )

    @property
    def data_folder(self) -> Path:
        if self.data_dir:
            return Path(self.data_dir).expanduser()
        folder = self.model.resolve()
        return _DATA.expanduser() / f"{folder.name}-{digest([bytes(folder)])[:8]}"

    @property
    def model_name(self) -> str:
        return self.served_model_name or self.model.resolve().name


def within_open_files(config: Config) -> Config:
    """Return the settings with no more connections than this process's limit of open files allows,
    and room for those that are answered 503; say so if that is fewer. Raises ConfigError for a
    limit below what a process needs for itself."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY:
        return config
    own = _OWN_FILES + _FILES_OF_ENGINE * config.engines + SPARE_FILES
    room = most - own
    allowed = room - min(room // 2, _MOST_REFUSED)
    if allowed < 1:
        raise ConfigError(
            f"the limit of open files (ulimit -n) must be at least {own + 1}, got {most}"
        )
    if allowed >= config.max_connections:
        return config
    log.warning(
        "max_connections = %d is lowered to %d: the limit of open files (ulimit -n) is %d",
        *(config.max_connections, allowed, most),
    )
    return msgspec.structs.replace(config, max_connections=allowed)
