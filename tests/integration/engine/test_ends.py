"""Engines and clients that end, fail, fall silent or were never there, and who is told."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from math import inf
from typing import Any

import msgspec
import pytest
import zmq

from engine.client.client import EngineClient
from engine.client.connection import MAX_INBOX
from engine.config import EngineConfig
from engine.errors import ConfigError, EngineUnavailable, StepFailed
from engine.messages import Hello, Refusal, Status
from engine.process.engine import Engine
from engine.process.process import EngineProcess
from engine.steps.batch import Batch
from engine.weights.weights import Weights
from tests.conftest import MakeRequest
from tests.engines.numpy_runner import NumpyLaunched, NumpyRunner
from tests.engines.served_engine import NUM_SLOTS, RawClient, Serve, collect, connected, until


class BrokenRunner(NumpyRunner):
    """A device that fails on the fourth step."""

    steps = 0

    def launch(self, batch: Batch) -> NumpyLaunched:
        self.steps += 1
        if self.steps == 4:
            raise RuntimeError("the device fell off the bus")
        return super().launch(batch)


async def test_a_failing_step_ends_the_process_and_a_client_finds_the_one_that_comes_after(
    serve: Serve, endpoint: str, make_request: MakeRequest
) -> None:
    served = serve(BrokenRunner)
    async with connected(endpoint) as client:
        with pytest.raises(StepFailed):
            await collect(client, make_request(max_tokens=60))
        await until(lambda: client.status is None)
        with pytest.raises(EngineUnavailable):
            await collect(client, make_request())
        assert served.join() == StepFailed.exit_code
        serve()
        await client.wait_until_ready(120)
        assert len(await collect(client, make_request(max_tokens=5))) == 1


@pytest.mark.parametrize("drain_s", [120, 0])
async def test_draining_finishes_what_there_is_time_for_and_refuses_what_comes(
    serve: Serve, endpoint: str, make_request: MakeRequest, drain_s: int
) -> None:
    served = serve(drain_s=drain_s)
    async with connected(endpoint, heartbeat_s=0.02) as client:
        running = asyncio.create_task(collect(client, make_request(n=100, max_tokens=30)))
        await until(lambda: served.engine.has_work)
        served.process.drain()
        if drain_s:
            with pytest.raises(EngineUnavailable):
                await collect(client, make_request("b"))
            assert len(await running) == 100
        else:
            with pytest.raises(EngineUnavailable, match="shutting down"):
                await running
    assert served.join() == 0


async def test_no_engine_is_said_to_be_none(endpoint: str, make_request: MakeRequest) -> None:
    client = EngineClient(endpoint)
    await client.connect()
    with pytest.raises(EngineUnavailable, match=r"0\.05 s"):
        await client.wait_until_ready(0.05)
    with pytest.raises(EngineUnavailable, match="not ready"):
        await collect(client, make_request())
    await client.close()


async def test_closing_the_client_ends_its_requests(
    serve: Serve, endpoint: str, make_request: MakeRequest
) -> None:
    served = serve(client_timeout_s=0.5)
    client = EngineClient(endpoint)
    await client.connect()
    await client.wait_until_ready(120)
    running = asyncio.create_task(collect(client, make_request(n=100, max_tokens=60)))
    await until(lambda: served.engine.has_work)
    await client.close()
    with pytest.raises(EngineUnavailable, match="closed"):
        await running
    assert client.status is None


def test_a_silent_client_is_told_and_its_requests_are_aborted(
    serve: Serve, raw: RawClient, make_request: MakeRequest
) -> None:
    served = serve(client_timeout_s=0.1)
    raw.socket.send(msgspec.msgpack.encode(make_request(n=100, max_tokens=60)))
    refusal = raw.receive()
    while not isinstance(refusal, Refusal):
        refusal = raw.receive()
    assert refusal.code == "engine_unavailable"
    raw.socket.send(msgspec.msgpack.encode(Hello()))
    status = raw.receive()
    assert isinstance(status, Status)
    assert (status.running, status.waiting) == (0, 0)
    assert served.engine.scheduler.num_requests == 0


def test_an_endpoint_that_cannot_be_bound_is_a_config_error(weights: Weights) -> None:
    config = EngineConfig(num_slots=NUM_SLOTS, endpoint="ipc:///no/such/folder/engine")
    engine = Engine(weights.config, NumpyRunner(weights, NUM_SLOTS), config)
    with pytest.raises(ConfigError, match="/no/such/folder"):
        EngineProcess(engine, config)


STATUS = Status("ready", 8, 0, 0, 100, 1, 0, 64, 32, "silent")
Say = Callable[[Any], None]


@asynccontextmanager
async def heard_once(endpoint: str, heartbeat_s: float) -> AsyncIterator[tuple[EngineClient, Say]]:
    """A client of an engine that has said STATUS, and from now on says only what it is made to."""
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.bind(endpoint)
    client = EngineClient(endpoint, heartbeat_s=heartbeat_s, engine_timeout_s=inf)
    await client.connect()
    identity, _ = await asyncio.to_thread(router.recv_multipart)

    def say(message: Any) -> None:
        router.send_multipart([identity, msgspec.msgpack.encode(message)])

    say(STATUS)
    await client.wait_until_ready(120)
    yield client, say
    await client.close()
    context.destroy(linger=0)


async def test_an_engine_that_stops_answering_is_taken_for_gone(
    endpoint: str, make_request: MakeRequest
) -> None:
    async with heard_once(endpoint, heartbeat_s=0.02) as (client, _):
        asked = asyncio.create_task(collect(client, make_request()))
        await asyncio.sleep(0)  # lets it send
        client.engines[0].engine_timeout_s = 0.1
        with pytest.raises(EngineUnavailable, match="not answered"):
            await asked
        assert client.status is None


async def test_an_engine_whose_answer_is_not_read_yet_is_not_taken_for_gone(endpoint: str) -> None:
    async with heard_once(endpoint, heartbeat_s=0.05) as (client, say):
        while client.engines[0].silent_s == 0:
            await asyncio.sleep(0.001)
        # Behind much else that the engine said, in a loop with much else to do.
        for _ in range(5 * MAX_INBOX):
            say(Refusal("of nobody", "timed_out", ""))
        answer = msgspec.structs.replace(STATUS, state="draining")
        say(answer)
        client.engines[0].engine_timeout_s = 0.2
        while client.status != answer:
            assert client.status == STATUS
            time.sleep(0.1)
            await asyncio.sleep(0)
