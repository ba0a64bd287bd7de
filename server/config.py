"""ServerConfig: how an API process listens, and where its engine is.

Loaded by `engine.settings.load` like every other setting; nothing changes after loading.
"""

from __future__ import annotations

import re
from ipaddress import IPv6Address
from pathlib import Path

import msgspec

from engine.client.client import HEARTBEAT_S
from engine.config import DEMO_MODEL, EngineConfig, LogFormat, LogLevel
from server.model_identity import digest

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s]+")
"""Browser extensions and desktop programs have schemes of their own."""

MAX_API_PROCESSES = 256
MAX_ENGINES = 64
_DATA = Path("~/.local/share/srm")
_WORKER = re.compile(r"https?://(\[[0-9a-fA-F:.]+\]|[^/?#\s@:]+)(?::(\d{1,5}))?")


class ServerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How requests are received."""

    model: Path = DEMO_MODEL
    """Folder with config.json and tokenizer.json; the weights are the engine's business."""
    served_model_name: str = ""
    """What requests call the model; empty: the folder's name."""
    chat_template: str = ""
    """File with the Jinja template of chats; empty: the model folder's own, if it has one."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is every IPv4 address of the machine."""
    port: int = 8000
    """TCP port to listen on; 0 takes any free one."""
    api_processes: int = 0
    """Processes that answer requests, all on the same socket; each takes a core at most. 0: one for
    every four cores, at most 8."""
    engines: int = 1
    """Engine processes, each with the whole model; samples of requests are spread over them."""
    endpoint: str = EngineConfig().endpoint
    """Where the engine listens, as ZeroMQ spells it; with commas between those of several."""
    max_body_bytes: int = 32 * 1024 * 1024
    """Largest request body, in bytes."""
    max_waiting_bytes: int = EngineConfig().max_waiting_bytes
    """Most bytes of requests that wait, and of bodies that a process holds; 503 beyond them."""
    max_connections: int = 16_384
    """Most connections to an API process; 503 beyond them."""
    max_header_bytes: int = 32 * 1024
    """Largest request line with all headers, in bytes; 431 beyond it."""
    receive_timeout_s: float = 30.0
    """How long headers may take, and a body besides a second for each 16 KiB, in seconds."""
    send_timeout_s: float = 60.0
    """How long a client may take none of a reply before it is taken for gone, in seconds."""
    retry_grace_s: float = 2.0
    """How long a request waits for the retry of an SDK that timed out, in seconds; 0: never."""
    stream_max_rate: float = 0.0
    """Most times a second that a stream is sent what is new; 0: any number."""
    api_keys_file: str = ""
    """File of the keys that requests must have, one a line; empty: none but SRM_API_KEYS."""
    requests_per_minute: float = 0.0
    """Requests that each key may make; 0: any number."""
    tokens_per_minute: float = 0.0
    """Tokens of each key's prompts and completions over HTTP, not in batches; 0: any number."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages may send requests, such as https://example.org; * is every one."""
    admin_port: int = 0
    """Another port, the only one that then has metrics, the page and /v1/admin; 0: none."""
    admin_host: str = "127.0.0.1"
    """Address that `admin_port` listens on."""
    weights_dir: str = ""
    """Folder that other weights may be loaded from while serving; empty: any folder."""
    otlp_endpoint: str = ""
    """Where OpenTelemetry traces are sent, as http://HOST:4318/v1/traces; empty: nowhere."""
    data_dir: str = ""
    """Folder of files, batches and snapshots; empty: one for the model, in ~/.local/share/srm."""
    max_file_bytes: int = 8 * 1024**3
    """Largest file that may be uploaded, in bytes."""
    max_store_bytes: int = 64 * 1024**3
    """Most bytes of a key's files after an upload, at least 4096 for each; 0: any number."""
    max_batches: int = 0
    """Most batches that each key may have waiting or running; 0: any number."""
    max_batch_lines: int = 0
    """Most lines of a batch's input file; 0: any number."""
    batch_fsync_s: float = 1.0
    """How long results of batches may wait to be written together, in seconds; 0: not at all."""
    max_batch_lines_in_flight: int = 16_384
    """Most lines of all batches that are being answered; each takes some 20 KiB of memory."""
    batch_workers: tuple[str, ...] = ()
    """Servers that are sent lines of batches too, as http://HOST:PORT; of each address of HOST."""
    batch_worker_key_file: str = ""
    """File with the API key that is sent to them; empty: none."""
    log_level: LogLevel = EngineConfig().log_level
    """The least that is logged."""
    log_format: LogFormat = EngineConfig().log_format
    """Lines for a person, or a JSON object each."""
    stall_s: float = 5.0
    """How long an engine with work may take for a step, in seconds, before `/ready` says 503."""
    drain_s: float = EngineConfig().drain_s
    """How long a stop waits for running requests, in seconds."""
    listen_fd: int = -1
    """A listening socket inherited from the supervisor, instead of host and port."""
    admin_fd: int = -1
    """The same for `admin_host` and `admin_port`."""
    limits_fd: int = -1
    """Memory inherited from the supervisor, in which API processes count for all of them."""
    model_id: str = ""
    """Which model `model` has, to tell its batches from those of others."""
    why_no_jobs: str = ""
    """File that says why no batches run, while they cannot."""

    def __post_init__(self) -> None:
        for name in ("port", "admin_port"):
            if not 0 <= getattr(self, name) <= 65_535:
                raise ValueError(f"{name} must lie in 0 … 65535, got {getattr(self, name)}")
        if self.admin_port and self.admin_port == self.port:
            raise ValueError(f"admin_port must be another than port, got {self.admin_port}")
        for name in (
            *("max_body_bytes", "max_waiting_bytes", "max_connections", "max_header_bytes"),
            *("max_file_bytes", "max_batch_lines_in_flight"),
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_waiting_bytes < self.max_body_bytes:
            raise ValueError(
                f"max_waiting_bytes must be at least max_body_bytes = {self.max_body_bytes}, "
                f"got {self.max_waiting_bytes}"
            )
        for name in (
            *("drain_s", "retry_grace_s", "requests_per_minute", "tokens_per_minute"),
            *("max_store_bytes", "max_batches", "max_batch_lines", "batch_fsync_s"),
            "stream_max_rate",
        ):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        for name in ("receive_timeout_s", "send_timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        for origin in self.cors_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"cors_origins must be * or origins such as https://example.org, got {origin!r}"
                )
        for url in self.batch_workers:
            if not _is_worker(url):
                raise ValueError(f"batch_workers must be URLs as http://HOST:PORT, got {url!r}")
        if self.batch_worker_key_file and not self.batch_workers:
            raise ValueError(
                f"batch_worker_key_file = {self.batch_worker_key_file!r} is for batch_workers, "
                "and there are none"
            )
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

    @property
    def data_folder(self) -> Path:
        if self.data_dir:
            return Path(self.data_dir).expanduser()
        folder = self.model.resolve()
        return _DATA.expanduser() / f"{folder.name}-{digest([bytes(folder)])[:8]}"

    @property
    def model_name(self) -> str:
        return self.served_model_name or self.model.resolve().name


def _is_worker(url: str) -> bool:
    """Whether a URL has a host that can be looked up, and a port that there can be."""
    if (found := _WORKER.fullmatch(url)) is None:
        return False
    host, port = found.groups()
    try:
        _ = IPv6Address(host[1:-1]) if host.startswith("[") else host.encode("idna")
    except ValueError:
        return False
    return int(port or 1) in range(1, 65536)
