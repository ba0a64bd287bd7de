"""A retry of what timed out is the same request; everything else that is equal is another one.

The engine is held while clients leave and come: no request ends before its test has seen it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import httpx2
import openai
import pytest

from tests.engines.held_engine import held
from tests.engines.served_engine import until
from tests.serving import SERVER_FLAGS, Server

BODY = {"model": "tiny", "prompt": "the cat", "n": 5, "max_tokens": 20, "ignore_eos": True}
OVER = 1e-6
"""Seconds: a time-out that has passed as soon as a request runs."""
PATIENT = (*SERVER_FLAGS, "--retry-grace-s=3600", "--stall-s=1000")
HELD = "tests.engines.held_engine"


@pytest.fixture(scope="module")
def patient(text_model: Path) -> Iterator[Server]:
    with Server(text_model, *PATIENT, engine_module=HELD) as running:
        yield running


@pytest.fixture(scope="module")
def small(text_model: Path) -> Iterator[Server]:
    flags = (*PATIENT, "--num-slots=2", "--max-step-rows=2")
    with Server(text_model, *flags, engine_module=HELD) as running:
        yield running


def ended(server: Server, how: str = "") -> float:
    """Requests of the engine."""
    return server.metric("srm_engine_requests_total", how)


async def until_it_runs(server: Server) -> None:
    await until(lambda: server.metric("srm_engine_running_sequences") > 0)


async def until_asked(server: Server, count: int) -> None:
    """Until so many clients wait for a reply."""
    await until(lambda: server.metric("http_requests_in_flight") == count + 1)  # and this one


def sent(
    server: Server, says: float | None = None, count: int = 0, **fields: Any
) -> asyncio.Task[httpx.Response]:
    """A request of a client that says its time-out, as SDKs do, and waits for the reply."""
    headers = {"x-stainless-retry-count": str(count)}
    if says is not None:
        headers["x-stainless-read-timeout"] = str(says)

    async def send() -> httpx.Response:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            return await client.post("/v1/completions", json=BODY | fields, headers=headers)

    return asyncio.create_task(send())


async def given_up(server: Server, says: float | None = OVER, **fields: Any) -> None:
    """A request whose client leaves when the engine has it; the server has noticed."""
    noticed = server.metric("http_requests_total", "499")
    levels = [f"srm_engine_{name}_sequences" for name in ("running", "waiting")]
    before = sum(map(server.metric, levels))
    client = sent(server, says, **fields)
    await until(lambda: sum(map(server.metric, levels)) > before)
    client.cancel()
    await asyncio.gather(client, return_exceptions=True)
    await until(lambda: server.metric("http_requests_total", "499") > noticed)


async def test_the_retry_of_what_timed_out_gets_its_reply(
    patient: Server, text_model: Path
) -> None:
    before = ended(patient)
    with held(text_model):
        await given_up(patient)
        retry = sent(patient, 600, count=1)
        await until_asked(patient, 1)
    reply = await retry
    assert reply.status_code == 200
    assert len(reply.json()["choices"]) == BODY["n"]
    patient.wait_until_idle()
    assert ended(patient) == before + 1


async def test_a_reply_that_is_ready_waits_for_the_retry(patient: Server, text_model: Path) -> None:
    before = ended(patient)
    with held(text_model):
        await given_up(patient)
    patient.wait_until_idle()
    assert (await sent(patient, 600, count=2)).status_code == 200
    assert ended(patient) == before + 1


async def test_a_stream_that_had_not_begun_is_taken_over(small: Server, text_model: Path) -> None:
    before = ended(small)
    waiting = {"n": 1, "max_tokens": 3, "stream": True}
    with held(text_model):
        blocking = sent(small, n=2, prompt="mat")
        await until_it_runs(small)
        await given_up(small, **waiting)
        retry = sent(small, 600, count=1, **waiting)
        await until_asked(small, 2)
    assert (await retry).text.endswith("data: [DONE]\n\n")
    assert (await blocking).status_code == 200
    small.wait_until_idle()
    assert ended(small) == before + 2


async def test_nobody_waits_for_slots_of_a_request_that_was_given_up(
    small: Server, text_model: Path
) -> None:
    before = ended(small, "aborted")
    with held(text_model):
        await given_up(small, n=9)
        other = sent(small, n=2, max_tokens=3, prompt="mat")
        await until(lambda: ended(small, "aborted") > before)
    assert (await other).status_code == 200
    assert (await sent(small, 600, count=1, n=9)).status_code == 200
    assert ended(small, "aborted") == before + 1


async def test_without_a_retry_it_ends_after_the_grace(text_model: Path) -> None:
    flags = (*PATIENT, "--retry-grace-s=0.1")
    with Server(text_model, *flags, engine_module=HELD) as running, held(text_model):
        await given_up(running)
        running.wait_until_idle()
        assert ended(running, "aborted") == 1


@pytest.mark.parametrize("says", [None, 600, 0, float("nan")])
async def test_a_client_that_just_leaves_frees_its_slots_at_once(
    patient: Server, text_model: Path, says: float | None
) -> None:
    aborted = ended(patient, "aborted")
    with held(text_model):
        await given_up(patient, says)
        patient.wait_until_idle()  # less than the grace
    assert ended(patient, "aborted") == aborted + 1


async def test_first_attempts_are_never_merged(patient: Server) -> None:
    replies = await asyncio.gather(*(sent(patient, 600, n=3) for _ in range(4)))
    ids = {reply.json()["id"] for reply in replies}
    texts = {str(reply.json()["choices"]) for reply in replies}
    assert len(ids) == len(texts) == 4


async def test_a_retry_does_not_take_what_somebody_waits_for(
    patient: Server, text_model: Path
) -> None:
    with held(text_model):
        first = sent(patient, 600)
        await until_it_runs(patient)
        second = sent(patient, 600, count=1)
        await until_asked(patient, 2)
    one, two = await asyncio.gather(first, second)
    assert one.status_code == two.status_code == 200
    assert one.json()["id"] != two.json()["id"]


async def test_another_body_is_another_request(patient: Server, text_model: Path) -> None:
    before = ended(patient)
    with held(text_model):
        await given_up(patient, prompt="cat the")
        retry = sent(patient, 600, count=1)
        await until_asked(patient, 1)
    assert (await retry).status_code == 200
    patient.wait_until_idle()
    assert ended(patient) == before + 2


async def test_a_retry_replaces_a_connection_that_should_have_ended(
    patient: Server, text_model: Path
) -> None:
    with held(text_model):
        first = sent(patient, OVER)  # says so, and stays
        await until_it_runs(patient)
        second = sent(patient, 600, count=1)
        left = await first
    assert left.status_code == 504
    assert left.headers["x-should-retry"] == "false"
    assert (await second).status_code == 200


class TimesOut(httpx2.AsyncHTTPTransport):
    """The first try of a request does so once it runs; what the SDK says of it is its own."""

    def __init__(self, server: Server) -> None:
        super().__init__()
        self._server = server

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        request.extensions["timeout"] = {}
        answer = asyncio.create_task(super().handle_async_request(request))
        if request.headers["x-stainless-retry-count"] == "0":
            await until_it_runs(self._server)
            answer.cancel()
            await asyncio.gather(answer, return_exceptions=True)
            raise httpx2.ReadTimeout("", request=request)
        return await answer


async def test_the_sdk_runs_a_request_that_times_out_once(
    patient: Server, text_model: Path
) -> None:
    before = ended(patient)
    async with (
        httpx2.AsyncClient(transport=TimesOut(patient)) as http,
        openai.AsyncOpenAI(
            base_url=f"{patient.url}/v1", api_key="none", timeout=0.001, http_client=http
        ) as client,
    ):
        with held(text_model):
            noticed = patient.metric("http_requests_total", "499")
            body = {name: BODY[name] for name in ("model", "prompt", "n", "max_tokens")}
            retried = client.completions.create(**body, extra_body={"ignore_eos": True})  # type: ignore[call-overload]  # of a dict
            asked = asyncio.create_task(retried)
            await until(lambda: patient.metric("http_requests_total", "499") > noticed)
            await until_asked(patient, 1)
        assert len((await asked).choices) == BODY["n"]
    patient.wait_until_idle()
    assert ended(patient) == before + 1
