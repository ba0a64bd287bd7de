"""Fixtures give tests of the server a tokenizer, a store, and the application in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from srm.engine.client.client import EngineClient
from srm.server.routes.app import create_app
from srm.server.storage.states import StateStore
from srm.server.text.chat_template import ChatTemplate
from srm.server.text.text import Text
from srm.server.wiring import ServerWiring

Served = Callable[..., AbstractAsyncContextManager[httpx.AsyncClient]]


@pytest.fixture(scope="session")
def text(text_model: Path) -> Text:
    return Text(text_model)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StateStore]:
    store = StateStore(tmp_path)
    yield store
    store.close()


@pytest.fixture(scope="session")
def served(text: Text) -> Served:
    """served(**settings): a client of an application of these settings, without an engine."""

    @asynccontextmanager
    async def client(
        template: ChatTemplate | None = None, **settings: Any
    ) -> AsyncIterator[httpx.AsyncClient]:
        app = create_app(
            ServerWiring(**settings), EngineClient("tcp://127.0.0.1:1"), text, template
        )
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            yield http

    return client
