"""Responses made in the background that fail: by a bug, by a stop, on a full disk."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import httpx
import msgspec
import pytest
from fastapi import FastAPI
from msgspec import Raw

from srm.engine.client.client import EngineClient
from srm.errors import StoreFull
from srm.server.dialects.responses.endpoint import Turn, add_routes, make_in_background
from srm.server.generation.engine_request import RequestOwner
from srm.server.generation.states import States
from srm.server.http.draining import Draining
from srm.server.routes.app import create_app
from srm.server.storage.states import StateStore
from srm.server.text.text import Text
from srm.server.wiring import ServerWiring
from tests.kit.engines.numpy_runner import TINY

FULL = Mock(side_effect=StoreFull("no space"))
ID, OWNER = f"resp_{'0' * 32}", RequestOwner()
BEGINNING = {"id": ID, "status": "in_progress", "error": None, "background": True}


@pytest.fixture
def engine() -> AsyncMock:
    """It is told to stop, and not asked."""
    return AsyncMock()


@pytest.fixture
def states(store: StateStore, engine: AsyncMock) -> Iterator[States]:
    with ThreadPoolExecutor(1) as threads:
        yield States(store, engine, TINY, threads)


async def begun(states: States, make: Any) -> asyncio.Task[None]:
    beginning = json.dumps(BEGINNING).encode()
    await states.begin(ID, OWNER, Raw(msgspec.json.encode(Turn(Raw(beginning)))))
    task = asyncio.create_task(make_in_background(states, ID, OWNER, beginning, make))
    task.add_done_callback(lambda _: states.release(ID))
    return task


async def get(states: States, method: str = "GET", path: str = "") -> Any:
    app = FastAPI()
    add_routes(app.router, states)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://srm") as client:
        return (await client.request(method, f"/v1/responses/{ID}{path}")).json()


async def test_a_bug_fails_one_response_alone(
    states: States, caplog: pytest.LogCaptureFixture
) -> None:
    async def make() -> None:
        assert await get(states) == BEGINNING
        raise ZeroDivisionError

    await (await begun(states, make))
    failed = await get(states)
    assert failed["error"] == {
        "code": "server_error", "message": "internal server error", "type": "api_error",
    }  # fmt: skip
    assert failed == {**BEGINNING, "status": "failed", "error": failed["error"]}
    assert "ZeroDivisionError" in caplog.text and ID in caplog.text


async def test_a_stop_fails_what_it_does_not_wait_for(states: States) -> None:
    task = await begun(states, asyncio.Event().wait)
    assert await get(states) == BEGINNING
    task.cancel()
    await task
    assert (await get(states))["error"]["message"] == "the server is shutting down"


async def test_on_a_full_disk_it_has_failed_all_the_same(
    states: States,
    store: StateStore,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def make() -> None:
        monkeypatch.setattr(store, "add", FULL)
        raise ZeroDivisionError

    task = await begun(states, make)
    await task
    await asyncio.sleep(0)  # what is called when it is done
    for _ in range(2):
        failed = await get(states)
        assert failed["status"] == "failed"
        assert "or could not store it" in failed["error"]["message"]
    assert "could not be stored: no space" in caplog.text


@pytest.mark.parametrize(("method", "path"), [("POST", "/cancel"), ("DELETE", "")])
async def test_what_cannot_be_stored_is_stopped_all_the_same(
    states: States,
    store: StateStore,
    engine: AsyncMock,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    path: str,
) -> None:
    task = await begun(states, asyncio.Event().wait)
    monkeypatch.setattr(store, "add" if path else "delete", FULL)
    with pytest.raises(StoreFull):
        await get(states, method, path)
    assert engine.control.await_args.args[0].names == {ID}
    task.cancel()
    await task


async def test_what_cannot_begin_is_refused(
    states: States, store: StateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    with pytest.raises(StoreFull):
        await begun(states, None)
    assert store.get(ID, "") is None


async def test_what_it_needs_is_closed_after_it(text: Text, tmp_path: Path) -> None:
    client, draining = EngineClient("tcp://127.0.0.1:1"), Draining()
    config = ServerWiring(data_dir=str(tmp_path))
    app = create_app(config, client, text, draining=draining)
    is_closed: list[bool] = []

    async def end() -> None:
        for _ in range(100):
            await asyncio.sleep(0)
        is_closed.append(client.is_closed)

    async with app.router.lifespan_context(app):
        draining.tasks.add(asyncio.create_task(end()))
    assert is_closed == [False]
