"""What a thread of an API process waits for or meets concerns those alone who asked for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from srm.engine.weights.weights import Weights
from srm.server.dialects.chat import tokenize
from srm.server.routes import scrape
from srm.server.routes.app import STORE_THREADS
from srm.server.schema.json_parts import SMALL
from srm.server.storage.store import Store
from tests.kit.engines.numpy_runner import tiny_weights
from tests.kit.engines.served_app import application
from tests.kit.engines.served_engine import Serve, until
from tests.kit.serving import COMPLETIONS, TEXT_MODEL, error_of


class Work(NamedTuple):
    """A function that threads call, a request that needs it, and how many are called at once."""

    owner: Any
    function: str
    method: str
    path: str
    given: dict[str, Any]
    threads: str
    """How their names begin."""
    most: int


UPLOAD = {"files": {"file": ("in.jsonl", b"{}")}, "data": {"purpose": "batch"}}
LARGE = {"content": b'{"prompt":"a"' + b" " * SMALL + b"}"}
LONG = {"json": {"prompt": "the cat sat"}}
WORK = {
    "metrics": Work(scrape, "read_families", "GET", "/metrics", {}, "metrics", 1),
    "files": Work(Store, "list_files", "GET", "/v1/files", {}, "store", STORE_THREADS),
    "uploads": Work(Store, "bytes_of", "POST", "/v1/files", UPLOAD, "store", STORE_THREADS),
    "batches": Work(Store, "list_batches", "GET", "/v1/batches", {}, "store", STORE_THREADS),
    "large bodies": Work(tokenize, "parse_tokenize", "POST", "/tokenize", LARGE, "large", 1),
    "long texts": Work(tokenize.Tokenizing, "_tokenized", "POST", "/tokenize", LONG, "long", 1),
}


@pytest.fixture(scope="module")
def weights() -> Weights:
    return tiny_weights(config=TEXT_MODEL)


@pytest.fixture
async def http(
    serve: Serve, endpoint: str, text_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the application, on an engine, for which texts are long that are not."""
    monkeypatch.setattr(tokenize, "AT_ONCE", 5)
    serve()
    async with application(endpoint, text_model, data_dir=str(tmp_path / "data")) as (app, _):
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            yield client


async def ask(http: httpx.AsyncClient, work: Work) -> httpx.Response:
    headers = {"content-type": "application/json"} if "content" in work.given else {}
    return await http.request(work.method, work.path, headers=headers, **work.given)


async def check_served(http: httpx.AsyncClient, *threads: str) -> None:
    """All but these threads' requests are answered, and those that need none."""
    for work in WORK.values():
        if work.threads not in threads:
            assert (await ask(http, work)).status_code == 200
    assert (await http.get("/health")).status_code == 200
    assert (await http.post("/tokenize", json={"prompt": "a"})).status_code == 200
    reply = await http.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 2})
    assert reply.status_code == 200


@pytest.mark.parametrize("name", WORK)
async def test_who_waits_for_a_thread_that_hangs_waits_alone(
    name: str, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = WORK[name]
    real, answers = getattr(work.owner, work.function), threading.Event()
    called = 0

    def hang(*args: Any) -> Any:
        nonlocal called
        if threading.current_thread().name.startswith(work.threads):
            called += 1
            assert answers.wait(120)
        return real(*args)

    monkeypatch.setattr(work.owner, work.function, hang)
    waiting = [asyncio.create_task(ask(http, work)) for _ in range(work.most + 1)]
    try:
        await until(lambda: called == work.most)
        await check_served(http, work.threads)
        assert called == work.most and not any(task.done() for task in waiting)
    finally:
        answers.set()
    assert {reply.status_code for reply in await asyncio.gather(*waiting)} == {200}


@pytest.mark.parametrize("name", WORK)
async def test_who_meets_a_bug_in_a_thread_gets_the_error_alone(
    name: str, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text "Internal Server Error", and not an error in our shape."""
    work = WORK[name]
    with monkeypatch.context() as broken:
        broken.setattr(work.owner, work.function, lambda *_: 1 / 0)
        error_of(await ask(http, work), 500)
    await check_served(http)
