"""Pausing, resuming and ending of requests as an API process asks engines for it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from srm.engine.client.client import EngineClient
from srm.engine.errors import SwapInProgress
from srm.engine.messages import (
    Abort,
    EndRequests,
    HoldWeights,
    LoadWeights,
    Pause,
    Resume,
)
from tests.engines.making import request_of
from tests.engines.served_engine import Serve, collect, connected, until

PAUSE = Pause("pause", 1_000.0)


def are_paused(client: EngineClient) -> list[bool]:
    return [engine.status is not None and engine.status.paused for engine in client.engines]


def staged(folder: Path) -> LoadWeights:
    """A change that waits for what runs, and then for its sender."""
    return LoadWeights("change", str(folder), "finish", is_staged=True)


async def test_who_changes_weights_elsewhere_does_not_prolong_a_pause(
    serve: Serve, endpoint: str
) -> None:
    serve()
    async with connected(endpoint, heartbeat_s=0.02) as client, asyncio.timeout(120):
        await client.control(Pause("pause", 0.2))
        while any(are_paused(client)):
            client.engines[0].send(HoldWeights("change"))
            await asyncio.sleep(0.01)


async def test_what_a_change_of_weights_waits_for_is_not_paused(
    serve: Serve, endpoint: str, tiny_folder: Path
) -> None:
    served = serve()
    async with connected(endpoint, heartbeat_s=0.02) as client:
        await client.engines[0].ask(staged(tiny_folder))
        with pytest.raises(SwapInProgress, match=r"'finish', which waits .* pause when they are"):
            await client.control(PAUSE)
        assert are_paused(client) == [False]
        client.engines[0].send(Abort("change"))
        await until(lambda: served.process.weight_reload.current is None)
        await client.control(PAUSE)
        assert are_paused(client) == [True]


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
