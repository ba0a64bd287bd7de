"""Engines and clients that end, fail, fall silent or were never there, and who is told."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Iterator
from math import inf
from multiprocessing.context import SpawnProcess

import msgspec
import pytest
import zmq.asyncio

from engine.client.client import MAX_INBOX, EngineClient
from engine.config import EngineConfig
from engine.errors import ConfigError, EngineUnavailable, StepFailed
from engine.messages import Hello, Refusal, Status
from engine.process.engine import Engine
from engine.process.process import EngineProcess
from engine.process.process import serve as serve_engine
from engine.steps.batch import Batch
from engine.weights.weights import Weights
from tests.conftest import MakeRequest
from tests.engines.numpy_runner import NumpyLaunched, NumpyRunner, tiny_weights
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


async def test_an_engine_that_stops_answering_is_taken_for_gone(
    endpoint: str, make_request: MakeRequest
) -> None:
    context = zmq.asyncio.Context()
    router = context.socket(zmq.ROUTER)
    router.bind(endpoint)
    client = EngineClient(endpoint, heartbeat_s=0.02, engine_timeout_s=inf)
    await client.connect()
    identity, _ = await router.recv_multipart()
    await router.send_multipart([identity, msgspec.msgpack.encode(STATUS)])
    await client.wait_until_ready(120)
    asked = asyncio.create_task(collect(client, make_request()))
    await router.recv_multipart()
    client._engine_timeout_s = 0.1
    with pytest.raises(EngineUnavailable, match="not answered"):
        await asked
    assert client.status is None
    await client.close()
    context.destroy(linger=0)


async def test_an_engine_whose_answer_is_not_read_yet_is_not_taken_for_gone(endpoint: str) -> None:
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.bind(endpoint)
    client = EngineClient(endpoint, heartbeat_s=0.05, engine_timeout_s=inf)
    await client.connect()
    identity, _ = await asyncio.to_thread(router.recv_multipart)
    router.send_multipart([identity, msgspec.msgpack.encode(STATUS)])
    await client.wait_until_ready(120)
    while client.silent_s == 0:
        await asyncio.sleep(0.001)
    # Behind much else that the engine said, in a loop with much else to do.
    gone = msgspec.msgpack.encode(Refusal("of nobody", "timed_out", ""))
    for _ in range(5 * MAX_INBOX):
        router.send_multipart([identity, gone])
    answer = msgspec.structs.replace(STATUS, state="draining")
    router.send_multipart([identity, msgspec.msgpack.encode(answer)])
    client._engine_timeout_s = 0.2
    while client.status != answer:
        assert client.status == STATUS
        time.sleep(0.1)
        await asyncio.sleep(0)
    await client.close()
    context.destroy(linger=0)


def serve_tiny(endpoint: str) -> None:
    """What `python -m engine` does, on the numpy runner."""
    weights = tiny_weights()
    config = EngineConfig(num_slots=NUM_SLOTS, endpoint=endpoint)
    engine = Engine(weights.config, NumpyRunner(weights, NUM_SLOTS), config)
    raise SystemExit(serve_engine(engine, config))


@pytest.fixture
def engine_process(endpoint: str) -> Iterator[SpawnProcess]:
    process = multiprocessing.get_context("spawn").Process(target=serve_tiny, args=(endpoint,))
    process.start()
    yield process
    process.kill()
    process.join()


@pytest.mark.parametrize("is_killed", [False, True])
async def test_a_terminated_engine_finishes_and_a_killed_one_fails_its_requests_at_once(
    engine_process: SpawnProcess, endpoint: str, make_request: MakeRequest, is_killed: bool
) -> None:
    request = make_request(n=100, max_tokens=30, emit="delta")
    async with connected(endpoint) as client:
        outputs = client.generate(request)
        await anext(outputs)
        if is_killed:
            engine_process.kill()
            with pytest.raises(EngineUnavailable, match="lost"):
                async for _ in outputs:
                    pass
        else:
            engine_process.terminate()
            last = [output async for output in outputs if output.finish_reason]
            assert len(last) == 100
            await asyncio.to_thread(engine_process.join, 120)
            assert engine_process.exitcode == 0
