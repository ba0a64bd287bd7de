"""Pausing, resuming and ending of requests as an API process asks engines for it."""

from __future__ import annotations

import asyncio

import msgspec

from srm.engine.messages import (
    EndRequests,
    Pause,
    Resume,
)
from tests.engines.making import request_of
from tests.engines.served_engine import Serve, collect, connected, until

PAUSE = Pause("pause", 1_000.0)


async def test_batches_are_not_ended_by_name(serve: Serve, endpoint: str) -> None:
    served = serve()
    requests = [
        msgspec.structs.replace(request_of(id, max_tokens=9, durable=id == "batch"), name="mine")
        for id in ("batch", "mine")
    ]
    async with connected(endpoint) as client:
        await client.control(PAUSE)
        asked = [asyncio.create_task(collect(client, request)) for request in requests]
        await until(lambda: served.engine.scheduler.num_requests == 2)
        done = await client.control(EndRequests("ends", "mine"))
        assert done.detail["requests"] == 1
        await client.control(Resume("resume"))
        ends = [(await outputs)[-1].finish_reason for outputs in asked]
    assert ends == ["length", "abort"]
