"""The application of one API process: routes, error handlers, the engine connection's lifetime.

Knows what there is and not how it works.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import get_args

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.types import ASGIApp

from srm.engine.client.client import EngineClient
from srm.errors import StoreError
from srm.server import errors, metrics
from srm.server.dialects.chat import endpoint as chat
from srm.server.dialects.chat import tokenize
from srm.server.dialects.completions import endpoint as completions
from srm.server.dialects.completions import models
from srm.server.dialects.messages import endpoint as messages
from srm.server.dialects.responses import endpoint as responses
from srm.server.dialects.rollouts import render, sglang, vllm
from srm.server.dialects.rollouts.control import TrainerControl
from srm.server.generation.states import States
from srm.server.http.auth import Auth
from srm.server.http.cors import Cors
from srm.server.http.draining import Draining
from srm.server.http.keys import Keys, check_limits, load_keys
from srm.server.http.request_middleware import RequestMiddleware
from srm.server.http.responses import add_operations
from srm.server.http.traces import Tracer
from srm.server.loop_turns import show_turns
from srm.server.reply.responder import PastRouter
from srm.server.routes import admin, batches, files, health, pages, scrape, states, trees
from srm.server.routes.services import services
from srm.server.schema.openapi import Operation
from srm.server.storage.records import BatchStatus
from srm.server.storage.states import StateStore
from srm.server.storage.store import Store
from srm.server.text.chat_template import ChatTemplate
from srm.server.text.text import Text
from srm.server.wiring import ServerWiring
from srm.tasks import beside

log = logging.getLogger(__name__)

_GROUPS = {
    "Completions and chats": (completions, chat, responses, messages),
    "Rollouts": (vllm, sglang, render),
    "States": (states,),
    "Trees": (trees,),
    "Files and batches": (files, batches),
    "Tokens": (tokenize,),
    "Models": (models,),
    "State of the server": (health, scrape),
    "Administration": (admin,),
    "Pages": (pages,),
}
OPERATIONS: tuple[Operation, ...] = tuple(
    msgspec.structs.replace(operation, tag=tag)
    for tag, modules in _GROUPS.items()
    for module in modules
    for operation in module.OPERATIONS
)
"""The documented operations of all routes below."""

STORE_THREADS = 16
"""Most concurrent operations on files: a slow disk holds up nothing else."""


def create_app(
    config: ServerWiring,
    client: EngineClient,
    text: Text,
    template: ChatTemplate | None = None,
    draining: Draining | None = None,
    keys: Keys | None = None,
) -> FastAPI:
    """Return the application of an API process. It takes nothing new once `draining` is on.

    Requests are checked against `keys` as they are then; without `keys`, against those of
    `config` and the environment.

    Connects `client` at startup, and closes it and `template` at shutdown. Raises ConfigError for
    keys, limits and traces that cannot be.
    """
    draining = draining or Draining()
    keys = load_keys(config.api_keys_file, os.environ) if keys is None else keys
    check_limits(config, keys)
    tracer = Tracer(config.otlp_endpoint, config.model_name) if config.otlp_endpoint else None

    store = Store(config.data_folder)
    threads = ThreadPoolExecutor(STORE_THREADS, thread_name_prefix="store")

    state_store = StateStore(config.data_folder)
    saved = States(state_store, client, text.model, threads, config.max_state_bytes)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        await client.connect()
        try:
            async with beside(show_turns(config.heartbeat_fd)):
                yield
        finally:
            await asyncio.gather(*draining.tasks, return_exceptions=True)  # all are cancelled
            await client.close()
            completing.close()
            if template is not None:
                template.close()
            if tracer is not None:
                await asyncio.to_thread(tracer.close)
            threads.shutdown(wait=False)
            store.close()
            state_store.close()

    def update() -> None:
        for number, reason in enumerate(health.why_not_ready(client, config.stall_s)):
            metrics.ENGINE_UP.labels(str(number)).set(not reason)
            if status := client.engines[number].status:
                metrics.ENGINE_INFO.labels(str(number), status.arithmetic).set(1)
        metrics.BUILD_INFO.labels(*health.build()).set(1)
        _update_gauges(store)

    def retry_after_s() -> int:
        return client.status.retry_after_s if client.status else 1

    # FastAPI's own document says nothing of bodies; a redirect leads nowhere behind a proxy.
    app = FastAPI(openapi_url=None, redirect_slashes=False, lifespan=lifespan)
    app.add_exception_handler(HTTPException, errors.framework_error)
    made = services(
        *(client, text, config.model_name, template),
        *(config.stream_max_rate, config.stream_keepalive_s),
        saved,
    )
    served, completing, chatting = made[:3]
    generating = [endpoint.route(config.max_body_bytes) for endpoint in made[1:]]
    router = app.router
    router.routes += generating
    most = config.max_body_bytes
    add_operations(router, completions.OPERATIONS[1:], [completing.fork], most)
    add_operations(router, messages.OPERATIONS[1:], [made.messages.count], most)
    tokenizing = tokenize.Tokenizing(text, served, template)
    tokenize.add_routes(router, tokenizing, config.max_body_bytes)
    render.add_routes(router, chatting.start, completing.start, config.max_body_bytes)
    Files = files.Files(store, threads, config.max_file_bytes, config.max_store_bytes)
    jobs = batches.Batches(store, threads, config, has_chats=template is not None)
    files.add_routes(router, Files)
    batches.add_routes(router, jobs, config.max_body_bytes)
    responses.add_routes(router, saved)
    states.add_routes(router, saved, served, text, template, config.max_body_bytes)
    growing = trees.Trees(client, saved, served, text)
    trees.add_routes(router, growing, config.max_body_bytes)
    models.add_routes(router, served)
    health.add_routes(router, client, config.stall_s, draining)
    operator = admin.Admin(client, config)
    admin.add_routes(router, operator)
    control = TrainerControl(client, operator.change_as, config.pause_lease_s)
    check_ready = partial(health.check_ready, client, config.stall_s)
    vllm.add_routes(router, control)
    trainers = sglang.SglangRoutes(control, config.model_name, check_ready)
    sglang.add_routes(router, trainers)
    scrape.add_routes(router, config.model_name, update)
    pages.add_routes(router, OPERATIONS, config.root_path, config.example)

    stack = app.build_middleware_stack()
    assert isinstance(stack, ServerErrorMiddleware)  # a bug is answered in our shape, further out
    routed = PastRouter(stack.app, generating)
    allowed: ASGIApp = Auth(routed, config, keys, retry_after_s, draining)
    if config.cors_origins:
        allowed = Cors(allowed, config.cors_origins, OPERATIONS)
    app.middleware_stack = RequestMiddleware(allowed, tracer, config.root_path)
    return app


def _update_gauges(store: Store) -> None:
    """Set the gauges of files, batches and their disk; NaN where that does not work. Blocks."""
    try:
        num_bytes: float = store.bytes_of()
        counts: dict[str, float] = {**store.count_batches()}
    except StoreError as error:
        log.warning("metrics have no files and batches: %s", error.message)
        num_bytes, counts = math.nan, dict.fromkeys(get_args(BatchStatus), math.nan)
    try:
        disk = os.statvfs(store.folder)
    except OSError:
        metrics.DATA_FREE.set(math.nan)
        metrics.DATA_SIZE.set(math.nan)
    else:
        metrics.DATA_FREE.set(disk.f_bavail * disk.f_frsize)
        metrics.DATA_SIZE.set(disk.f_blocks * disk.f_frsize)
    metrics.FILES_BYTES.set(num_bytes)
    for status in get_args(BatchStatus):
        metrics.BATCHES.labels(status).set(counts.get(status, 0))
