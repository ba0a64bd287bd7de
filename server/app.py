"""The application of one API process: routes, error handlers, the engine connection's lifetime.

Knows what there is and not how it works.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from engine.client import EngineClient
from engine.errors import SRMError
from server import completions, errors, health, metrics, reference
from server.boundary import Boundary
from server.config import ServerConfig
from server.text import Text

OPERATIONS = (
    *completions.OPERATIONS,
    *health.OPERATIONS,
    *metrics.OPERATIONS,
    *reference.OPERATIONS,
)
"""All that is told of the routes below."""


def create_app(config: ServerConfig, client: EngineClient, text: Text) -> FastAPI:
    """Everything an API process answers. Connects `client` at startup and closes it at shutdown."""

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        await client.connect()
        try:
            yield
        finally:
            await client.close()

    app = FastAPI(openapi_url=None, lifespan=lifespan)  # ours is in `reference`
    app.add_middleware(Boundary)
    app.add_exception_handler(SRMError, errors.srm_error)
    app.add_exception_handler(HTTPException, errors.framework_error)
    app.add_exception_handler(RequestValidationError, errors.validation_error)
    service = completions.Completions(client, text, config.model_name)
    app.include_router(completions.routes(service, config.max_body_bytes))
    app.include_router(health.routes(client))
    app.include_router(metrics.router)
    app.include_router(reference.routes(OPERATIONS))
    return app
