"""A retry of what timed out is the same request; everything else that is equal is another one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.serving import SERVER_FLAGS, Server

LONG = {"n": 150, "max_tokens": 120, "ignore_eos": True}
BODY = {"model": "tiny", "prompt": "the cat", **LONG}


@pytest.fixture(scope="module")
def patient(text_model: Path) -> Iterator[Server]:
    with Server(text_model, *SERVER_FLAGS, "--retry-grace-s=30") as running:
        yield running


def started(server: Server) -> float:
    """Requests that the engine was ever given."""
    return server.metric("srm_engine_requests_total") + (
        1 if server.metric("srm_engine_running_sequences") else 0
    )


async def send(
    server: Server, timeout_s: float, says: float | None = None, count: int = 0, **fields: Any
) -> httpx.Response | None:
    """A request of a client that leaves after `timeout_s`; what it says is `says`, as SDKs do."""
    headers = {"x-stainless-retry-count": str(count)}
    if says is not None:
        headers["x-stainless-read-timeout"] = str(says)
    async with httpx.AsyncClient(base_url=server.url, timeout=timeout_s) as client:
        try:
            return await client.post("/v1/completions", json=BODY | fields, headers=headers)
        except httpx.ReadTimeout:
            return None


async def test_the_retry_of_what_timed_out_gets_its_reply(patient: Server) -> None:
    before = started(patient)
    assert await send(patient, 0.4, 0.4) is None
    await asyncio.sleep(0.3)
    reply = await send(patient, 60, 600, count=1)
    assert reply is not None and reply.status_code == 200
    assert len(reply.json()["choices"]) == LONG["n"]
    assert started(patient) == before + 1
    patient.wait_until_idle()


async def test_a_reply_that_is_ready_waits_for_the_retry(patient: Server) -> None:
    before = started(patient)
    short = {"n": 100, "max_tokens": 100}
    assert await send(patient, 0.05, 0.05, **short) is None
    patient.wait_until_idle(20)
    reply = await send(patient, 60, 600, count=2, **short)
    assert reply is not None and reply.status_code == 200
    assert started(patient) == before + 1


async def test_a_stream_that_had_not_begun_is_taken_over(text_model: Path) -> None:
    flags = [*SERVER_FLAGS, "--num-slots=2", "--max-step-rows=2"]
    with Server(text_model, *flags) as running:
        blocking = asyncio.create_task(send(running, 60, n=100, prompt="mat"))
        while not running.metric("srm_engine_running_sequences"):
            await asyncio.sleep(0.01)
        waiting = {"n": 1, "max_tokens": 3, "stream": True}
        assert await send(running, 0.2, 0.2, **waiting) is None
        reply = await send(running, 60, 600, count=1, **waiting)
        assert reply is not None and reply.text.endswith("data: [DONE]\n\n")
        assert await blocking is not None
        assert running.metric("srm_engine_requests_total") == 2


async def test_without_a_retry_it_ends_after_the_grace(text_model: Path) -> None:
    with Server(text_model, *SERVER_FLAGS, "--retry-grace-s=0.5") as running:
        assert await send(running, 0.3, 0.3, n=2_900) is None
        assert running.metric("srm_engine_running_sequences") > 0
        running.wait_until_idle(10)
        assert running.metric("srm_engine_requests_total", "aborted") == 1


@pytest.mark.parametrize("says", [None, 600, 0, float("nan")])
async def test_a_client_that_just_leaves_frees_its_slots_at_once(
    patient: Server, says: float | None
) -> None:
    aborted = patient.metric("srm_engine_requests_total", "aborted")
    assert await send(patient, 0.3, says, n=2_900) is None
    patient.wait_until_idle(10)  # less than the grace
    assert patient.metric("srm_engine_requests_total", "aborted") == aborted + 1


async def test_first_attempts_are_never_merged(patient: Server) -> None:
    short = {"n": 3, "max_tokens": 20}
    replies = await asyncio.gather(*(send(patient, 60, 600, **short) for _ in range(4)))
    assert all(reply is not None for reply in replies)
    ids = {reply.json()["id"] for reply in replies if reply}
    texts = {str(reply.json()["choices"]) for reply in replies if reply}
    assert len(ids) == len(texts) == 4


async def test_a_retry_does_not_take_what_somebody_waits_for(patient: Server) -> None:
    first = asyncio.create_task(send(patient, 60, 600, n=60))
    while not patient.metric("srm_engine_running_sequences"):
        await asyncio.sleep(0.01)
    second = await send(patient, 60, 600, count=1, n=60)
    one = await first
    assert one is not None and second is not None
    assert one.status_code == second.status_code == 200
    assert one.json()["id"] != second.json()["id"]


async def test_another_body_is_another_request(patient: Server) -> None:
    before = started(patient)
    assert await send(patient, 0.1, 0.1, prompt="cat the", n=100) is None
    reply = await send(patient, 60, 600, count=1, prompt="the cat", n=100)
    assert reply is not None and reply.status_code == 200
    patient.wait_until_idle(20)
    assert started(patient) == before + 2


async def test_a_retry_replaces_a_connection_that_should_have_ended(patient: Server) -> None:
    first = asyncio.create_task(send(patient, 60, 0.3, prompt="mat cat"))  # says, and stays
    await asyncio.sleep(0.6)
    second = await send(patient, 60, 600, count=1, prompt="mat cat")
    assert second is not None and second.status_code == 200
    left = await first
    assert left is not None and left.status_code == 504
    assert left.headers["x-should-retry"] == "false"


def test_the_sdk_runs_a_request_that_times_out_once(patient: Server) -> None:
    before = started(patient)
    client = openai.OpenAI(base_url=f"{patient.url}/v1", api_key="none", max_retries=5, timeout=0.5)
    body = {name: BODY[name] for name in ("model", "prompt", "n", "max_tokens")}
    answer = client.completions.create(**body, extra_body={"ignore_eos": True})  # type: ignore[call-overload]  # of a dict
    assert len(answer.choices) == LONG["n"]
    assert started(patient) == before + 1
    client.close()
