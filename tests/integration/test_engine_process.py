"""A request across the process boundary: EngineClient against EngineProcess on the numpy runner."""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from multiprocessing.context import SpawnProcess
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq
import zmq.asyncio

from engine.batch import Batch
from engine.client import EngineClient
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import (
    ConfigError,
    ContextTooLong,
    EngineUnavailable,
    InvalidRequest,
    Overloaded,
    StepFailed,
)
from engine.messages import (
    Abort,
    FromEngine,
    Hello,
    Output,
    Refusal,
    Request,
    SamplingParams,
    Status,
)
from engine.process import EngineProcess
from engine.process import serve as serve_engine
from engine.weights import Weights
from tests.conftest import MakeRequest
from tests.numpy_runner import NumpyLaunched, NumpyRunner, tiny_weights

NUM_SLOTS = 8


class Served:
    """An EngineProcess in a thread."""

    def __init__(self, engine: Engine, config: EngineConfig, client_timeout_s: float) -> None:
        self.engine = engine
        self.process = EngineProcess(engine, config, client_timeout_s)
        self.exit_code: int | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        self.exit_code = self.process.run()

    def join(self) -> int | None:
        self._thread.join(10)
        return self.exit_code


class BrokenRunner(NumpyRunner):
    """A device that fails on the fourth step."""

    steps = 0

    def launch(self, batch: Batch) -> NumpyLaunched:
        self.steps += 1
        if self.steps == 4:
            raise RuntimeError("the device fell off the bus")
        return super().launch(batch)


Serve = Callable[..., Served]


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/engine"


@pytest.fixture
def serve(weights: Weights, endpoint: str) -> Iterator[Serve]:
    """serve(BrokenRunner, max_waiting=3, drain_s=0): starts one; all are drained at the end."""
    started = []

    def start(
        runner: type[NumpyRunner] = NumpyRunner,
        client_timeout_s: float = 10,
        max_waiting: int = 100,
        drain_s: float = 5,
    ) -> Served:
        config = EngineConfig(
            num_slots=NUM_SLOTS,
            max_step_rows=8,
            max_step_tokens=32,
            max_waiting=max_waiting,
            endpoint=endpoint,
            drain_s=drain_s,
        )
        engine = Engine(
            weights.config, runner(weights, config.pool_slots), config, weights.fingerprint
        )
        served = Served(engine, config, client_timeout_s)
        started.append(served)
        return served

    yield start
    for served in started:
        served.process.drain()
        served.process.drain()
        served.join()
        assert served.exit_code is not None


@asynccontextmanager
async def connected(endpoint: str, **settings: float) -> AsyncIterator[EngineClient]:
    client = EngineClient(endpoint, **settings)
    await client.connect()
    try:
        await client.wait_until_ready(5)
        yield client
    finally:
        await client.close()


async def collect(client: EngineClient, request: Request) -> list[Output]:
    return [output async for output in client.generate(request)]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.01)


async def test_generate_returns_what_an_engine_in_process_returns(
    serve: Serve, endpoint: str, weights: Weights
) -> None:
    served = serve()
    params = SamplingParams(n=3, max_tokens=10, seed=3)
    request = Request(id="a", prompt_token_ids=np.array([5, 6, 7], "<i4").tobytes(), params=params)
    async with connected(endpoint) as client:
        outputs = await collect(client, request)
    config = EngineConfig(num_slots=NUM_SLOTS)
    local = Engine(weights.config, NumpyRunner(weights, config.pool_slots), config)
    (expected,) = local.generate([[5, 6, 7]], params)
    assert sorted(outputs, key=lambda o: o.index) == [
        msgspec.structs.replace(output, id="a") for output in expected
    ]
    assert not served.engine.has_work


async def test_deltas_add_up_to_the_final_output(
    serve: Serve, endpoint: str, make_request: MakeRequest
) -> None:
    serve()
    async with connected(endpoint) as client:
        final = await collect(client, make_request("a", max_tokens=9, seed=4, logprobs=0))
        deltas = await collect(
            client, make_request("b", max_tokens=9, seed=4, logprobs=0, emit="delta")
        )
    assert len(deltas) == 9
    assert [delta.finish_reason for delta in deltas] == [None] * 8 + ["length"]
    assert b"".join(delta.token_ids for delta in deltas) == final[0].token_ids
    assert b"".join(delta.logprobs for delta in deltas) == final[0].logprobs


async def test_status_says_what_the_engine_is(serve: Serve, endpoint: str) -> None:
    serve()
    async with connected(endpoint) as client:
        assert client.status == Status(
            state="ready",
            num_slots=NUM_SLOTS,
            running=0,
            waiting=0,
            max_waiting=100,
            steps=0,
            n_ctx=64,
            vocab_size=32,
            fingerprint="tiny-0",
        )


async def test_refusals_arrive_as_the_errors_they_were(
    serve: Serve, endpoint: str, make_request: MakeRequest
) -> None:
    serve(max_waiting=10)
    async with connected(endpoint) as client:
        with pytest.raises(ContextTooLong, match=r"65 tokens; .* holds 64"):
            await collect(client, make_request(prompt=[3] * 65))
        with pytest.raises(InvalidRequest, match="top_p") as invalid:
            await collect(client, make_request(top_p=0.0))
        assert invalid.value.param == "top_p"
        running = asyncio.create_task(collect(client, make_request("a", n=10, max_tokens=60)))
        await asyncio.sleep(0)  # lets it send first
        with pytest.raises(Overloaded) as overloaded:
            await collect(client, make_request("b", n=10))
        assert overloaded.value.retry_after_s > 0
        assert len(await running) == 10


async def test_leaving_early_aborts(serve: Serve, endpoint: str, make_request: MakeRequest) -> None:
    served = serve()
    async with connected(endpoint) as client:
        request = make_request(n=20, max_tokens=60, emit="delta")
        async with aclosing(client.generate(request)) as outputs:
            async for _ in outputs:
                break
        await until(lambda: not served.engine.has_work)
    assert served.engine.scheduler.table.num_free == NUM_SLOTS


async def test_cancelling_the_reader_aborts(
    serve: Serve, endpoint: str, make_request: MakeRequest
) -> None:
    served = serve()
    async with connected(endpoint) as client:
        task = asyncio.create_task(collect(client, make_request(n=50, max_tokens=60)))
        await until(lambda: served.engine.has_work)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: not served.engine.has_work)


async def test_the_same_id_twice_is_refused_and_the_first_goes_on(
    serve: Serve, endpoint: str, make_request: MakeRequest
) -> None:
    served = serve()
    async with connected(endpoint) as client, connected(endpoint) as other:
        first = asyncio.create_task(collect(client, make_request(n=20, max_tokens=50)))
        await until(lambda: served.engine.has_work)
        for one in (client, other):
            with pytest.raises(InvalidRequest, match="in use"):
                await collect(one, make_request())
        assert len(await first) == 20


async def test_a_failing_step_fails_the_requests_and_ends_the_process(
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


async def test_a_client_finds_the_engine_that_comes_after(
    serve: Serve, endpoint: str, make_request: MakeRequest
) -> None:
    served = serve(BrokenRunner)
    async with connected(endpoint) as client:
        with pytest.raises(StepFailed):
            await collect(client, make_request(max_tokens=60))
        served.join()
        await until(lambda: client.status is None)
        serve()
        await client.wait_until_ready(5)
        assert len(await collect(client, make_request(max_tokens=5))) == 1


async def test_draining_finishes_what_runs_and_refuses_what_comes(
    serve: Serve, endpoint: str, make_request: MakeRequest
) -> None:
    served = serve()
    async with connected(endpoint, heartbeat_s=0.02) as client:
        running = asyncio.create_task(collect(client, make_request(n=100, max_tokens=30)))
        await until(lambda: served.engine.has_work)
        served.process.drain()
        with pytest.raises(EngineUnavailable):
            await collect(client, make_request("b"))
        assert len(await running) == 100
    assert served.join() == 0


async def test_a_drain_out_of_time_answers_what_it_drops(
    serve: Serve, endpoint: str, make_request: MakeRequest
) -> None:
    served = serve(drain_s=0)
    async with connected(endpoint) as client:
        running = asyncio.create_task(collect(client, make_request(n=100, max_tokens=60)))
        await until(lambda: served.engine.has_work)
        served.process.drain()
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
    await client.wait_until_ready(5)
    running = asyncio.create_task(collect(client, make_request(n=100, max_tokens=60)))
    await until(lambda: served.engine.has_work)
    await client.close()
    with pytest.raises(EngineUnavailable, match="closed"):
        await running
    assert client.status is None


class RawClient:
    """Speaks to the engine in bytes, like a client with a fault."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.connect(endpoint)

    def receive(self) -> FromEngine:
        assert self.socket.poll(5000), "the engine did not answer"
        message: FromEngine = msgspec.msgpack.decode(self.socket.recv(), type=FromEngine)
        return message

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def raw(endpoint: str) -> Iterator[RawClient]:
    client = RawClient(endpoint)
    yield client
    client.close()


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\xff" * 100,
        b"\x91" * 100_000,
        b"\xa4\xff\xff\xff\xff",
        msgspec.msgpack.encode({"type": "request"}),
        msgspec.msgpack.encode({"type": "outputs", "outputs": []}),
        msgspec.msgpack.encode({"type": "hello", "surplus": 1}),
        msgspec.msgpack.encode(["request"]),
        msgspec.msgpack.encode({"type": "abort", "id": 3}),
        b"\x82\xa4type\xa5abort\xa2id\xa2\xff\xfe",
    ],
)
def test_a_malformed_message_does_not_stop_the_engine(
    serve: Serve, raw: RawClient, payload: bytes
) -> None:
    serve()
    raw.socket.send(payload)
    raw.socket.send_multipart([payload, b"", payload])
    raw.socket.send(msgspec.msgpack.encode(Hello()))
    assert isinstance(raw.receive(), Status)


def test_a_malformed_request_with_an_id_is_refused(serve: Serve, raw: RawClient) -> None:
    serve()
    raw.socket.send(msgspec.msgpack.encode({"type": "request", "id": "a", "prompt": 1}))
    refusal = raw.receive()
    assert isinstance(refusal, Refusal)
    assert (refusal.id, refusal.code) == ("a", "invalid_request")
    assert "prompt" in refusal.message


async def test_only_the_sender_can_abort_a_request(
    serve: Serve, raw: RawClient, endpoint: str, make_request: MakeRequest
) -> None:
    served = serve()
    async with connected(endpoint) as client:
        running = asyncio.create_task(collect(client, make_request(n=30, max_tokens=50)))
        await until(lambda: served.engine.has_work)
        raw.socket.send(msgspec.msgpack.encode(Abort("a")))
        raw.socket.send(msgspec.msgpack.encode(Hello()))
        assert isinstance(await asyncio.to_thread(raw.receive), Status)
        assert len(await running) == 30


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
    engine = Engine(weights.config, NumpyRunner(weights, config.pool_slots), config)
    with pytest.raises(ConfigError, match="/no/such/folder"):
        EngineProcess(engine, config)


async def test_an_engine_that_stops_answering_is_taken_for_gone(
    endpoint: str, make_request: MakeRequest
) -> None:
    context = zmq.asyncio.Context()
    router = context.socket(zmq.ROUTER)
    router.bind(endpoint)
    client = EngineClient(endpoint, heartbeat_s=0.02, engine_timeout_s=0.1)
    await client.connect()
    identity, _ = await router.recv_multipart()
    status = Status("ready", 8, 0, 0, 100, 0, 64, 32, "silent")
    await router.send_multipart([identity, msgspec.msgpack.encode(status)])
    await client.wait_until_ready(5)
    with pytest.raises(EngineUnavailable, match="not answered"):
        await collect(client, make_request())
    assert client.status is None
    await client.close()
    context.destroy(linger=0)


def serve_tiny(endpoint: str) -> None:
    """What `python -m engine` does, on the numpy runner."""
    weights = tiny_weights()
    config = EngineConfig(num_slots=NUM_SLOTS, endpoint=endpoint)
    engine = Engine(weights.config, NumpyRunner(weights, config.pool_slots), config)
    raise SystemExit(serve_engine(engine, config))


@pytest.fixture
def engine_process(endpoint: str) -> Iterator[SpawnProcess]:
    process = multiprocessing.get_context("spawn").Process(target=serve_tiny, args=(endpoint,))
    process.start()
    yield process
    process.kill()
    process.join()


async def test_a_terminated_engine_finishes_and_exits_with_zero(
    engine_process: SpawnProcess, endpoint: str, make_request: MakeRequest
) -> None:
    client = EngineClient(endpoint)
    await client.connect()
    await client.wait_until_ready(20)
    outputs = client.generate(make_request(n=100, max_tokens=30, emit="delta"))
    await anext(outputs)
    engine_process.terminate()
    last = [output async for output in outputs if output.finish_reason]
    assert len(last) == 100
    await asyncio.to_thread(engine_process.join, 10)
    assert engine_process.exitcode == 0
    await client.close()


async def test_a_killed_engine_fails_its_requests_at_once(
    engine_process: SpawnProcess, endpoint: str, make_request: MakeRequest
) -> None:
    client = EngineClient(endpoint)
    await client.connect()
    await client.wait_until_ready(20)
    outputs = client.generate(make_request(n=100, max_tokens=60, emit="delta"))
    await anext(outputs)
    engine_process.kill()
    with pytest.raises(EngineUnavailable, match="lost"):
        async for _ in outputs:
            pass
    await client.close()
