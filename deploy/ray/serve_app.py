"""The server as a Ray Serve application: each replica has an engine process of its own.

It answers what `srm serve` answers, but for files and batches, which live on one machine's disk,
and administration and metrics, which would be those of whichever replica is met.
"""

from __future__ import annotations

import asyncio
import re
import tempfile
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, ClassVar

from ray import serve
from starlette.types import ASGIApp, Receive, Scope, Send

from srm.engine.client.client import EngineClient
from srm.engine.config import EngineConfig
from srm.errors import ConfigError
from srm.server.config import ServerConfig
from srm.server.errors import ErrorBody, ErrorDetail, response
from srm.server.routes.app import create_app
from srm.server.routes.health import check_ready
from srm.server.routes.services import template_of
from srm.server.supervise.embedded_engine import PRIVATE, with_engine
from srm.server.supervise.launch import wired
from srm.server.text.text import Text
from srm.server.text.tokenizer_files import use_defaults
from srm.server.wiring import ServerWiring
from srm.settings import build_struct

OF_SERVER = frozenset(
    {
        *("served_model_name", "chat_template", "max_body_bytes", "stall_s"),
        *("api_keys_file", "cors_origins", "allowed_hosts", "otlp_endpoint"),
    }
)
"""Settings of `srm serve` that are honoured here; those of the engine are besides."""
OF_ENGINE = frozenset(EngineConfig.__struct_fields__) - PRIVATE
ANSWERED = re.compile(
    "(/v1)?/((de)?tokenize|tokenizer_info)|/v1/(completions|chat/completions|models.*)"
    "|/health|/ready|/version|/ping"
)
"""Paths that are answered."""


class Replica:
    """One replica: the application of one API process, and its engine process."""

    current: ClassVar[Replica]
    """The one of this process."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, settings: Mapping[str, Any], engine_module: str = "srm.engine"
    ) -> None:
        """Wait until the engine is ready. Raises SRMError."""
        server, engine = settings_of(settings)
        self._stall_s = server.stall_s
        self._num_requests = 0
        self._folder = tempfile.TemporaryDirectory(prefix="srm-serve-")
        server = wired(ServerWiring, server, data_dir=self._folder.name)
        text = Text(server.model)
        use_defaults(server.model, server.sampling_defaults)
        own = server.chat_template, server.special_tokens_in_messages
        template = template_of(server.model, text, *own)
        ready: asyncio.Future[EngineClient] = asyncio.get_running_loop().create_future()

        async def hold(client: EngineClient) -> None:
            ready.set_result(client)
            await asyncio.Event().wait()

        self._engine = asyncio.create_task(
            with_engine(engine, engine_module, hold, lambda: self._num_requests)
        )
        waited: set[asyncio.Future[Any]] = {ready, self._engine}
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            self._engine.result()
        self._client = ready.result()
        self._fastapi = create_app(server, self._client, text, template)
        Replica.current = self

    def check_health(self) -> None:
        """Raise if this replica is to be replaced: its engine was given up, or answers nothing."""
        if self._engine.done():
            self._engine.result()
        check_ready(self._client, self._stall_s)

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request: this is the application that Serve calls."""
        if scope["type"] == "lifespan":  # all that there is begins and ends with the replica
            for _ in range(2):
                message = await receive()
                await send({"type": f"{message['type']}.complete"})
        elif not ANSWERED.fullmatch(scope["path"].removeprefix(scope.get("root_path", ""))):
            wrong = f"{scope['path']} is not answered under Ray Serve, but by `srm serve`"
            error = ErrorBody(ErrorDetail(wrong, "not_found_error", None, "not_found"))
            await response(HTTPStatus.NOT_FOUND, error)(scope, receive, send)
        else:
            self._num_requests += 1
            await self._fastapi(scope, receive, send)


def app() -> ASGIApp:
    """Return the application of this process; Serve calls this once the replica is ready."""

    # A function, since uvicorn takes a bound method for an application of ASGI 2.
    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await Replica.current.answer(scope, receive, send)

    return answer


def build(settings: dict[str, Any]) -> serve.Application:
    """Return the application, of the deployment `srm`. Raises ConfigError for settings that are not
    honoured here."""
    return application(settings)


def application(settings: Mapping[str, Any], **options: Any) -> serve.Application:
    """Return the application with further options of the deployment."""
    settings_of(settings)
    return serve.deployment(serve.ingress(app)(Replica), name="srm", **options).bind(settings)


def settings_of(given: Mapping[str, Any]) -> tuple[ServerConfig, EngineConfig]:
    """Return the settings by name as those of server and engine. Raises ConfigError."""
    for name in given:
        if name not in OF_SERVER | OF_ENGINE:
            known = ", ".join(sorted(OF_SERVER | OF_ENGINE))
            raise ConfigError(f"{name} is no setting of a replica; these are: {known}")
    server = {name: given[name] for name in ServerConfig.__struct_fields__ if name in given}
    engine = {name: given[name] for name in EngineConfig.__struct_fields__ if name in given}
    return build_struct(ServerConfig, server, "args"), build_struct(EngineConfig, engine, "args")
