"""A retry of what timed out is the same request; everything else that is equal is another one.

The engine is held while clients leave and come: no request ends before its test has seen it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from engine.client.client import EngineClient
from engine.errors import TimedOut
from engine.messages import Request
from tests.engines.held_engine import HeldEngine, held
from tests.engines.served_app import Headers, Visit, application
from tests.engines.served_engine import NUM_SLOTS, Serve, Served, until

BODY = {"prompt": [5, 6], "n": NUM_SLOTS, "max_tokens": 20}
OVER = 1e-6
"""Seconds: a time-out that has passed as soon as a request runs."""


class Noting(HeldEngine):
    """Notes the requests that it takes and those that are aborted."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.added: list[str] = []
        self.aborted: list[str] = []

    def add(self, request: Request, *more: Any) -> None:
        super().add(request, *more)
        self.added.append(request.id)

    def abort(self, request_id: str) -> None:
        self.aborted += [request_id] * self.has_request(request_id)
        super().abort(request_id)


class Place:
    """The application, and the engine that it asks."""

    def __init__(self, app: Any, client: EngineClient, served: Served, folder: Path) -> None:
        self.app = app
        self.client = client
        assert isinstance(served.engine, Noting)
        self.engine = served.engine
        self.folder = folder

    def sent(self, says: float | None = None, count: int = 0, **fields: Any) -> Visit:
        """A request of a client that says its time-out, as SDKs do, and waits for the reply."""
        headers: Headers = [(b"x-stainless-retry-count", b"%d" % count)]
        if says is not None:
            headers.append((b"x-stainless-read-timeout", str(says).encode()))
        return Visit(self.app, BODY | fields, headers)

    async def until_it_runs(self) -> None:
        await until(lambda: self.engine.scheduler.table.num_owned > 0)

    async def given_up(self, says: float | None = OVER, **fields: Any) -> None:
        """A request whose client leaves when the engine has it; the server has noticed."""
        before = len(self.engine.added)
        client = self.sent(says, **fields)
        await until(lambda: len(self.engine.added) > before)
        client.leave()
        await client.end()

    async def until_idle(self) -> None:
        await until(lambda: self.engine.scheduler.num_requests == 0)


Open = Callable[..., Any]


@pytest.fixture
def opened(serve: Serve, endpoint: str, tiny_folder: Path) -> Open:
    @asynccontextmanager
    async def open_it(grace_s: float = 3_600) -> AsyncIterator[Place]:
        served = serve(make_engine=Noting, model=tiny_folder)
        async with application(endpoint, tiny_folder, retry_grace_s=grace_s) as (app, client):
            yield Place(app, client, served, tiny_folder)

    return open_it


async def soon() -> None:
    """Long enough for whatever is to be done at once."""
    for _ in range(200):
        await asyncio.sleep(0)


def num_choices(reply: tuple[int, bytes]) -> int:
    assert reply[0] == 200, reply
    return len(json.loads(reply[1])["choices"])


async def test_the_retry_of_what_timed_out_gets_its_reply(opened: Open) -> None:
    async with opened() as place:
        with held(place.folder):
            await place.given_up()
            retry = place.sent(600, count=1)
            await soon()
        assert num_choices(await retry.reply()) == BODY["n"]
        with held(place.folder):
            await place.given_up(prompt=[9])
        await place.until_idle()  # the reply waits for the retry
        assert num_choices(await place.sent(600, count=2, prompt=[9]).reply()) == BODY["n"]
        assert len(place.engine.added) == 2
        assert not place.engine.aborted


async def test_the_retry_of_what_timed_out_gets_its_refusal_too(opened: Open) -> None:
    async with opened() as place:
        with held(place.folder):
            await place.given_up()
            place.client.streams.refuse(place.engine.added[-1], TimedOut("it took too long"))
            await soon()
            retry = place.sent(600, count=1)
            await soon()
            assert retry.task.done() and len(place.engine.added) == 1
        assert (await retry.reply())[0] == 504


async def test_a_stream_that_had_not_begun_is_taken_over(opened: Open) -> None:
    waiting = {"n": 1, "max_tokens": 3, "stream": True}
    async with opened() as place:
        with held(place.folder):
            blocking = place.sent(prompt=[9])
            await place.until_it_runs()
            await place.given_up(**waiting)
            retry = place.sent(600, count=1, **waiting)
            await soon()
        status, events = await retry.reply()
        assert status == 200 and events.endswith(b"data: [DONE]\n\n")
        assert (await blocking.reply())[0] == 200
        assert len(place.engine.added) == 2


async def test_nobody_waits_for_slots_of_a_request_that_was_given_up(opened: Open) -> None:
    async with opened() as place:
        with held(place.folder):
            await place.given_up(n=NUM_SLOTS + 1)
            await place.until_it_runs()
            other = place.sent(n=2, max_tokens=3, prompt=[9])
            await until(lambda: place.engine.aborted == place.engine.added[:1])
        assert (await other.reply())[0] == 200
        assert (await place.sent(600, count=1, n=NUM_SLOTS + 1).reply())[0] == 200
        assert len(place.engine.added) == 3 and len(place.engine.aborted) == 1


async def test_without_a_retry_it_ends_after_the_grace(opened: Open) -> None:
    async with opened(grace_s=0.05) as place:
        with held(place.folder):
            await place.given_up()
            await place.until_idle()
        assert place.engine.aborted == place.engine.added


async def test_a_client_that_just_leaves_frees_its_slots_at_once(opened: Open) -> None:
    async with opened() as place:
        with held(place.folder):
            for says in (None, 600, 0, float("nan")):
                await place.given_up(says)
                await place.until_idle()  # in less than the grace
        assert place.engine.aborted == place.engine.added


async def test_a_request_that_somebody_waits_for_is_never_taken_nor_is_another(
    opened: Open,
) -> None:
    async with opened() as place:
        with held(place.folder):
            first = [place.sent(600) for _ in range(3)]  # none of which is a retry
            await until(lambda: len(place.engine.added) == 3)
            retry = place.sent(600, count=1)
            await place.given_up(prompt=[9])
            other = place.sent(600, count=1, prompt=[8])  # another body
            await until(lambda: len(place.engine.added) == 6)
        replies = [await item.reply() for item in (*first, retry, other)]
        assert {status for status, _ in replies} == {200}
        assert len({json.loads(body)["id"] for _, body in replies}) == 5


async def test_a_retry_replaces_a_connection_that_should_have_ended(opened: Open) -> None:
    async with opened() as place:
        with held(place.folder):
            first = place.sent(OVER)  # says so, and stays
            await place.until_it_runs()
            second = place.sent(600, count=1)
            status, _ = await first.reply()
        assert status == 504
        assert (b"x-should-retry", b"false") in first.sent[0]["headers"]
        assert (await second.reply())[0] == 200
        assert len(place.engine.added) == 1


class TimesOut(httpx2.AsyncBaseTransport):
    """The first try of a request does so once it runs; what the SDK says of it is its own."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self.num_tries = 0

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        self.num_tries += 1
        visit = Visit(self._place.app, json.loads(request.content), request.headers.raw)
        if self.num_tries == 1:
            await self._place.until_it_runs()
            visit.leave()
            await visit.end()
            raise httpx2.ReadTimeout("", request=request)
        status, body = await visit.reply()
        return httpx2.Response(status, content=body, headers={"content-type": "application/json"})


async def test_the_sdk_runs_a_request_that_times_out_once(opened: Open) -> None:
    async with opened() as place:
        transport = TimesOut(place)
        async with (
            httpx2.AsyncClient(transport=transport) as http,
            openai.AsyncOpenAI(
                base_url="http://srm/v1", api_key="none", timeout=0.001, http_client=http
            ) as client,
        ):
            with held(place.folder):
                asked = asyncio.create_task(
                    client.completions.create(model="tiny", prompt=[5, 6], n=5, max_tokens=20)
                )
                await until(lambda: transport.num_tries == 2)
            assert len((await asked).choices) == 5
        assert len(place.engine.added) == 1 and not place.engine.aborted
