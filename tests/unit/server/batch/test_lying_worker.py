"""Another server that lies costs a line's time: the line is answered once, and nothing ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from msgspec.structs import replace

from srm.engine.client.client import EngineClient
from srm.server.batch import fleet, remote_worker
from srm.server.batch.engine_retry import EngineRetry
from srm.server.batch.fleet import Fleet
from srm.server.batch.lines import NO_USAGE, answer_line
from srm.server.batch.remote_worker import RemoteWorker, new_http
from srm.server.wiring import ServerWiring
from tests.attack.lying_worker import ANSWERED, LIES, SELF_LIES, LyingWorker
from tests.kit.engines.served_engine import until
from tests.unit.server.batch.test_fleet import (
    IDENTITY,
    N_CTX,
    OWNER,
    Here,
    Place,
    line,
    make_reply,
    until_all_ended,
)

IN_SOCKETS = 16 * 2**20
"""Bytes that lie in buffers of the system, or came before anybody looked."""


class Liars(Place):
    """This server, busy, and one that lies."""

    def __init__(self, liar: LyingWorker, http: httpx.AsyncClient) -> None:
        super().__init__()
        url = httpx.URL(liar.url)
        self.http = http
        self.worker = self.fleet.workers[liar.url] = RemoteWorker(http, liar.url, url)
        self.fleet.own.used = 1  # so that the other one has more room


@pytest.fixture
async def liar() -> AsyncIterator[LyingWorker]:
    async with LyingWorker(IDENTITY) as worker:
        yield worker


@pytest.fixture
async def place(liar: LyingWorker) -> AsyncIterator[Liars]:
    async with new_http() as http:
        yield Liars(liar, http)


@pytest.mark.parametrize("lie", LIES)
async def test_a_line_is_answered_here_whatever_another_server_answers(
    lie: str, liar: LyingWorker, place: Liars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer of `{}` was a completed line of status 200; 8 GB of an error were kept."""
    liar.lie = LIES[lie]
    await place.look()
    assert place.worker.room == 8
    monkeypatch.setattr(remote_worker, "MAX_ANSWER_S", 0.5)
    assert await place.answer(line(1)) == b"here"
    assert place.here.asked == ["a-1"] and liar.posts == [["a-1"]]
    await until(lambda: not liar.num_open)
    await until_all_ended()
    assert liar.num_sent < IN_SOCKETS
    assert place.worker.held_bytes == 0


async def test_a_line_is_answered_here_once_another_server_is_silent(
    liar: LyingWorker, place: Liars, caplog: pytest.LogCaptureFixture
) -> None:
    """However long one that shows signs of life may take."""
    await place.look()
    silence_s = place.http.timeout.read
    assert silence_s is not None and 0 < silence_s <= 20
    place.http.timeout = httpx.Timeout(30, read=0.05)
    liar.lie = LIES["silence"]
    assert await place.answer(line(1)) == b"here"
    assert caplog.messages == [f"{liar.url}: is sent no lines of batches: ReadTimeout: "]


@pytest.mark.parametrize("lie", ANSWERED)
async def test_an_answer_counts_once_whatever_follows_it(
    lie: str, liar: LyingWorker, place: Liars
) -> None:
    liar.lie = ANSWERED[lie]
    await place.look()
    assert await place.answer(line(1)) == make_reply(1)
    assert not place.here.asked and liar.posts == [["a-1"]]
    await until(lambda: not liar.num_open)
    await until_all_ended()


@pytest.mark.parametrize("lie", SELF_LIES)
async def test_a_server_that_lies_of_itself_is_sent_nothing(
    lie: str,
    liar: LyingWorker,
    place: Liars,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A reply of an odd charset ended the process that runs batches, at every look."""
    monkeypatch.setattr(remote_worker, "_LOOK_S", 0.5)
    liar.self_lie = SELF_LIES[lie]
    await place.look()
    await place.look()
    assert place.worker.room == 0 and place.fleet.room == 2
    (record,) = caplog.records if len(caplog.records) == 1 else caplog.records[-1:]
    assert len(record.getMessage()) < 500 and record.getMessage().isprintable()
    await until(lambda: not liar.num_open)
    assert liar.num_sent < IN_SOCKETS
    assert not place.http.cookies


async def test_who_lies_is_asked_less_and_less_until_it_says_the_truth(
    liar: LyingWorker, place: Liars, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(remote_worker, "time", SimpleNamespace(monotonic=lambda: now))
    liar.lie = LIES["nothing"]
    rooms = []
    for _ in range(8):
        await place.look()
        rooms.append(place.worker.room)
        if place.worker.room:
            assert await place.answer(line(1)) == b"here"
        now += 2
    assert rooms == [8, 8, 0, 8, 0, 0, 0, 8]
    now += 1_000
    liar.lie = ANSWERED["no end"]
    await place.look()
    assert await place.answer(line(1)) == make_reply(1)
    liar.lie = LIES["nothing"]
    assert await place.answer(line(1)) == b"here"
    now += 2
    await place.look()
    assert place.worker.room == 8, "as after its first lie"


async def test_of_lines_that_share_a_request_the_true_answers_count(
    liar: LyingWorker, place: Liars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_worker, "time", SimpleNamespace(monotonic=lambda: 100.0))

    async def some(asked: dict[str, Any]) -> AsyncIterator[bytes]:
        first, *rest = asked["lines"]
        async for part in ANSWERED["no end"]({**asked, "lines": [first]}):
            yield part
            if b"choices" in part:
                break
        async for part in LIES["nothing"]({**asked, "lines": rest}):
            yield part.partition(b"\r\n\r\n")[2] or part

    liar.lie = some
    await place.look()
    place.fleet.own.used = 2
    tasks = [asyncio.create_task(place.answer(line(number))) for number in range(3)]
    await until(lambda: bool(liar.posts) and place.worker.room == 0)
    place.fleet.own.used = 0
    await place.look()
    assert await asyncio.gather(*tasks) == [make_reply(0), b"here", b"here"]


@pytest.mark.parametrize("body", [b"{}", b'{"prompt":[]}', b'{"prompt":"a","n":0}', b"{"])
async def test_a_line_that_is_at_fault_goes_nowhere(
    body: bytes, liar: LyingWorker, place: Liars
) -> None:
    await place.look()
    assert await place.answer(line(1, body=body)) == b"here"
    assert not liar.posts and place.worker.room == 8


async def test_a_result_of_a_lie_is_none(liar: LyingWorker, place: Liars) -> None:
    liar.lie = LIES["10**30 tokens"]
    await place.look()
    place.here.answer = b'{"usage":null}'
    asked = line(1)
    result = await place.fleet.answer(asked, lambda them: answer_line(asked, them, OWNER, "a"))
    assert not result.is_failed and place.here.asked and result.usage == NO_USAGE


@pytest.mark.parametrize("fault", ["key file", "names", "engine"])
async def test_whatever_befalls_the_watch_this_server_goes_on(
    fault: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It ended the process that runs batches, again and again."""
    caplog.set_level(logging.ERROR)
    monkeypatch.setattr(fleet, "_LOOK_EVERY_S", 0.01)
    here = Here()
    status = SimpleNamespace(state="ready", n_ctx=N_CTX, fingerprint="a", arithmetic="cpu")
    client: Any = SimpleNamespace(status=status, losses=0, is_closed=False)
    result = Fleet({"/v1/completions": here}, EngineRetry(cast(EngineClient, client)))
    result.own.room = 2
    config = ServerWiring(model=tmp_path, batch_workers=("http://127.0.0.1:9",))
    looks = 0

    async def fail(*_: object) -> None:
        nonlocal looks
        looks += 1
        raise LookupError("unknown encoding: odd")

    if fault == "key file":
        key = tmp_path / "key"
        key.write_text("0123456789abcdef0123456789abcdef\n")
        config = replace(config, batch_worker_key_file=str(key))
        key.unlink()
    elif fault == "names":
        monkeypatch.setattr(Fleet, "find", fail)
    else:
        client.status = SimpleNamespace(state="ready")  # as of another version
    task = asyncio.create_task(result.watch(config, client))
    client_place = Place()
    client_place.fleet = result
    assert await client_place.answer(line(1)) == b"here"
    await until(lambda: bool(caplog.records) and (looks > 3 or fault != "names"))
    assert not task.done()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    (message,) = caplog.messages  # once, however often it is so
    assert "other servers are sent no lines" in message


async def test_of_a_names_addresses_some_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    async def getaddrinfo(*_: object, **__: object) -> list[Any]:
        return [(0, 0, 0, "", (f"10.0.{n // 256}.{n % 256}", 81)) for n in range(5_000)] * 2

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo, raising=False)
    place = Place()
    await place.fleet.find(("http://many:81",), httpx.AsyncClient())
    assert len(place.fleet.workers) == fleet.MAX_ADDRESSES
