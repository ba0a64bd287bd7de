"""The official OpenAI client against the real engine: 500 at once, retries, raw errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from http import HTTPStatus
from typing import Any

import httpx
import httpx2
import openai
import pytest

from srm.engine.config import DEMO_MODEL
from tests.kit.models.demo import START_S
from tests.kit.serving import COMPLETIONS, Server

NUM_SLOTS, MAX_WAITING = 128, 600
PROMPT = "Question: How many"


@pytest.fixture(scope="module")
def demo() -> Iterator[Server]:
    """The demo model on the MAX engine, with a queue that can be filled."""
    flags = (f"--num-slots={NUM_SLOTS}", f"--max-waiting={MAX_WAITING}")
    with Server(DEMO_MODEL, *flags, engine_module="srm.engine", start_s=START_S) as running:
        yield running
        running.wait_until_idle()


def client_of(
    demo: Server, replies: list[httpx2.Response] | None = None, max_retries: int = 0
) -> openai.AsyncOpenAI:
    """A client that keeps the replies."""

    async def note(response: httpx2.Response) -> None:
        if replies is not None:
            replies.append(response)

    http = httpx2.AsyncClient(event_hooks={"response": [note]}, timeout=600)
    return openai.AsyncOpenAI(
        base_url=f"{demo.url}/v1", api_key="none", max_retries=max_retries, http_client=http
    )


@pytest.fixture
async def client(demo: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(demo) as one:
        yield one


async def test_500_at_once_half_of_them_streams(demo: Server, client: openai.AsyncOpenAI) -> None:
    fields: dict[str, Any] = {"model": "demo", "prompt": PROMPT, "max_tokens": 6}

    async def ask_whole(seed: int) -> str:
        answer = await client.completions.create(**fields, seed=seed)
        text: str = answer.choices[0].text
        return text

    async def streamed(seed: int) -> str:
        events = await client.completions.create(**fields, seed=seed, stream=True)
        return "".join([event.choices[0].text async for event in events])

    texts = await asyncio.gather(
        *(call(seed) for seed in range(250) for call in (ask_whole, streamed))
    )
    assert texts[::2] == texts[1::2]
    assert len(set(texts)) > 200
    demo.wait_until_idle()


async def test_a_full_queue_is_waited_out_by_the_clients_own_retries(demo: Server) -> None:
    """Fill it, send one more that retries, and free it after its first refusal."""
    replies: list[httpx2.Response] = []
    body = {"prompt": PROMPT, "n": MAX_WAITING, "max_tokens": 100, "ignore_eos": True}
    count = MAX_WAITING - 10
    async with (
        client_of(demo, replies, max_retries=4) as one_more,
        httpx.AsyncClient(base_url=demo.url, timeout=600) as filler,
    ):
        async with filler.stream("POST", COMPLETIONS, json=body | {"stream": True}) as full:
            assert full.status_code == HTTPStatus.OK
            wanted = asyncio.create_task(
                one_more.completions.create(model="demo", prompt=PROMPT, n=count, max_tokens=1)
            )
            async with asyncio.timeout(30):
                while not replies:
                    await asyncio.sleep(0.01)
        answer = await wanted
    assert len(answer.choices) == count
    refused, *_, last = replies
    assert (refused.status_code, last.status_code) == (
        HTTPStatus.SERVICE_UNAVAILABLE,
        HTTPStatus.OK,
    )
    assert int(refused.headers["retry-after"]) >= 1


async def test_what_would_fail_again_is_not_retried(demo: Server) -> None:
    replies: list[httpx2.Response] = []
    async with client_of(demo, replies, max_retries=3) as one:
        with pytest.raises(openai.BadRequestError) as refused:
            await one.completions.create(model="demo", prompt=[5] * 600)
        with pytest.raises(openai.NotFoundError):
            await one.completions.create(model="other", prompt="x")
    assert [reply.status_code for reply in replies] == [400, 404]
    assert "600 tokens" in refused.value.message and "512" in refused.value.message
    raw = refused.value.response
    assert raw.headers["x-should-retry"] == "false"
    assert raw.headers["x-request-id"] == refused.value.request_id
    assert refused.value.body == raw.json()["error"]


async def test_leaving_500_streams_leaves_nothing(demo: Server, client: openai.AsyncOpenAI) -> None:
    async def leave(index: int) -> None:
        stream = await client.completions.create(
            model="demo", prompt=PROMPT, max_tokens=100, stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        events = aiter(stream)
        for _ in range(index % 5):
            await anext(events, None)  # a slow reader's events are few and large
        await stream.close()

    await asyncio.gather(*(leave(index) for index in range(500)))
    demo.wait_until_idle()
