"""`python -m srm.server api`: a process that answers HTTP, beside those of engines and batches."""

from __future__ import annotations

import logging
import os
import resource
import signal
import socket
from functools import partial

import msgspec
import uvicorn

from srm import logs
from srm.engine.client.client import ENGINE_TIMEOUT_S, EngineClient
from srm.errors import ConfigError
from srm.memory import collect_rarely
from srm.server.config import within_open_files
from srm.server.http.connection import Connection
from srm.server.http.draining import Draining, DrainingServer
from srm.server.http.keys import Keys
from srm.server.http.listeners import listen, listen_as
from srm.server.model_identity import as_started
from srm.server.routes.app import create_app
from srm.server.routes.services import template_of
from srm.server.text.text import Text
from srm.server.text.tokenizer_files import use_defaults
from srm.server.wiring import ServerWiring
from srm.settings import load

_KEEP_ALIVE_S = 75
"""How long a connection may idle: longer than clients keep one (httpx 5 s, aiohttp 15 s), since a
request is lost where both end it at the same time."""

log = logging.getLogger(__name__)


def main(argv: list[str]) -> int:
    """Answer HTTP until SIGTERM or SIGINT; running requests may finish first."""
    config = load(ServerWiring, argv, prog="python -m srm.server api")
    logs.configure(config.log_level, config.log_format)
    folder = as_started(config.model, config.kept_model)
    config = msgspec.structs.replace(config, model=folder)
    allow_open_files()
    config = within_open_files(config)
    text = Text(config.model)
    if not text.has_tokenizer:
        log.warning("%s has no tokenizer.json: prompts are token ids", config.model)
    use_defaults(config.model, config.sampling_defaults)
    own = config.chat_template, config.special_tokens_in_messages
    template = template_of(config.model, text, *own)
    if template is None:
        log.info("%s has no chat template: chats are refused", config.model)
    listeners = [_inherited(config.listen_fd) or listen_as(config)]
    if config.admin_port:
        admin = _inherited(config.admin_fd)
        listeners.append(admin or listen(config.admin_host, config.admin_port))
    # The engine is not given up while it may still be busy.
    timeout_s = max(ENGINE_TIMEOUT_S, 2 * config.stall_s)
    client = EngineClient(config.endpoint, engine_timeout_s=timeout_s)
    client.streams.spread.share(os.getpid(), config.api_processes)
    draining = Draining()
    keys = Keys([])
    signal.signal(signal.SIGHUP, lambda *_: _reread(keys, config.api_keys_file))
    keys.reread(config.api_keys_file, os.environ)
    server = DrainingServer(
        uvicorn.Config(
            create_app(config, client, text, template, draining, keys),
            loop="uvloop",
            http=partial(Connection, config),  # type: ignore[arg-type]  # made like the class
            ws="none",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
        ),
        draining,
        config.drain_s,
        client.leave,
    )
    collect_rarely()
    server.run(sockets=listeners)
    return 0


def _reread(keys: Keys, file: str) -> None:
    try:
        keys.reread(file, os.environ)
    except (ConfigError, OSError, ValueError) as error:  # whatever it is, it is not to get anywhere
        logging.error("API keys stay as they were: %s", error)
    else:
        logging.info("API keys have been read again")


def _inherited(fd: int) -> socket.socket | None:
    return socket.socket(fileno=fd) if fd >= 0 else None


def allow_open_files() -> None:
    """Raise the soft limit of open files, which connections are, to the hard limit."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
