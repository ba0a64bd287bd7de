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
from server import chat, completions, errors, health, metrics, models, service, tokenize
from server.answers import Answers
from server.boundary import Boundary
from server.chat_template import ChatTemplate
from server.config import ServerConfig
from server.text import Text


def create_app(
    config: ServerConfig, client: EngineClient, text: Text, template: ChatTemplate | None = None
) -> FastAPI:
    """Everything an API process answers.

    Connects `client` at startup, and closes it and `template` at shutdown.
    """

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        await client.connect()
        try:
            yield
        finally:
            await client.close()
            if template is not None:
                template.close()

    app = FastAPI(openapi_url=None, lifespan=lifespan)  # it would say nothing of bodies
    app.add_middleware(Boundary)
    app.add_exception_handler(SRMError, errors.srm_error)
    app.add_exception_handler(HTTPException, errors.framework_error)
    app.add_exception_handler(RequestValidationError, errors.validation_error)
    served = models.Models(config.model_name, text.model.n_ctx)
    answers = Answers(client)
    completing = completions.Completions(client, text, served, answers)
    chatting = chat.Chat(client, text, served, completing, template, answers)
    tokenizing = tokenize.Tokenizing(text, served, template)
    app.include_router(completions.routes(completing, config.max_body_bytes))
    app.include_router(chat.routes(chatting, config.max_body_bytes))
    app.include_router(tokenize.routes(tokenizing, config.max_body_bytes))
    app.include_router(models.routes(served))
    app.include_router(service.router)
    app.include_router(health.routes(client))
    app.include_router(metrics.router)
    return app
