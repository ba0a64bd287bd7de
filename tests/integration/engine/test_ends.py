"""Engines and clients that end, fail, fall silent or were never there, and who is told."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from math import inf
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from srm.engine.client.client import EngineClient
from srm.engine.client.connection import MAX_INBOX
from srm.engine.config import EngineConfig
from srm.engine.messages import (
    Abort,
    Hello,
    LoadWeights,
    Output,
    Outputs,
    Refusal,
    Status,
    StopSamples,
    TakeSnapshot,
)
from srm.engine.process.engine import Engine
from srm.engine.process.process import EngineProcess
from srm.engine.weights.weights import Weights
from srm.engine.wiring import EngineWiring
from srm.errors import ConfigError, EngineUnavailable, StepFailed
from srm.server.supervise.embedded_engine import with_engine
from srm.tasks import Fail, end_process
from tests.conftest import MakeRequest
from tests.kit.engines.numpy_runner import NumpyRunner
from tests.kit.engines.served_engine import (
    NUM_SLOTS,
    RawClient,
    Serve,
    Served,
    breaks_at,
    collect,
    connected,
    until,
)
from tests.kit.processes.held_engine import HeldEngine, held, release
from tests.kit.processes.lying_engine import OF_NOBODY, STATUS, lie
from tests.kit.serving import ROOT, wait_until


async def test_a_client_finds_the_engine_after_a_failing_step(
    serve: Serve, endpoint: str, make_request: MakeRequest
) -> None:
    served = serve(breaks_at(4))
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
    with pytest.raises(EngineUnavailable, match=r"does not answer|has not answered"):
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


async def test_progress_comes_with_steps_and_without(
    weights: Weights, endpoint: str, make_request: MakeRequest
) -> None:
    config = EngineWiring(endpoint=endpoint, num_slots=8)
    engine = Engine(weights.config, NumpyRunner(weights, 8), config)
    results: list[int] = []
    process = EngineProcess(engine, config, progress=lambda: results.append(engine.num_steps))
    running = threading.Thread(target=process.run)
    running.start()
    try:
        async with connected(endpoint) as client:
            await until(lambda: results.count(0) >= 3)
            await collect(client, make_request(max_tokens=20))
        assert len(set(results)) > 20
    finally:
        process.drain()
        running.join()


@contextmanager
def slow_client(served: Served, endpoint: str) -> Iterator[subprocess.Popen[str]]:
    """A process whose request runs and whose interpreter does nothing, until it is sent a line."""
    command = [sys.executable, "-m", "tests.kit.processes.slow_client", endpoint]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as client:
        try:
            assert client.stdout is not None and client.stdout.readline() == "asked\n"
            wait_until(lambda: served.engine.has_work)
            yield client
        finally:
            client.kill()


def test_a_client_whose_interpreter_is_held_up_keeps_its_requests(
    serve: Serve, endpoint: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    served = serve(make_engine=HeldEngine, model=tmp_path)
    with held(tmp_path), slow_client(served, endpoint) as client:
        served.process.clients.timeout_s = 0.0  # it counts as silent at once
        wait_until(lambda: "its process is there: its requests go on" in caplog.text)
        assert served.engine.has_work
        release(tmp_path)
        wait_until(lambda: not served.engine.has_work)
        message, _ = client.communicate("go on\n", timeout=120)
        assert message == "30\n"


@pytest.mark.parametrize("how", ["frozen", "dead"])
def test_the_requests_of_a_client_that_is_frozen_or_dead_are_ended(
    serve: Serve, endpoint: str, tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    served = serve(make_engine=HeldEngine, model=tmp_path, client_timeout_s=2)
    with held(tmp_path), slow_client(served, endpoint) as client:
        client.send_signal(signal.SIGSTOP if how == "frozen" else signal.SIGKILL)
        wait_until(lambda: not served.engine.has_work)
        assert "ended 1 requests of a client that is gone" in caplog.text
        if how == "frozen":
            client.send_signal(signal.SIGCONT)
            message, _ = client.communicate("go on\n", timeout=120)
            assert message == "the connection to the engine was lost\n"


def test_an_endpoint_that_cannot_be_bound_is_a_config_error(weights: Weights) -> None:
    config = EngineWiring(num_slots=NUM_SLOTS, endpoint="ipc:///no/such/folder/engine")
    engine = Engine(weights.config, NumpyRunner(weights, NUM_SLOTS), config)
    with pytest.raises(ConfigError, match="/no/such/folder"):
        EngineProcess(engine, config)


Say = Callable[[Any], None]


@asynccontextmanager
async def heard_once(
    endpoint: str, heartbeat_s: float, fail: Fail = end_process
) -> AsyncIterator[tuple[EngineClient, Say]]:
    """A client of an engine that has said STATUS, and from now on says only what it is made to."""
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.bind(endpoint)
    client = EngineClient(endpoint, heartbeat_s=heartbeat_s, engine_timeout_s=inf)
    await client.connect(fail)
    identity, _ = await asyncio.to_thread(router.recv_multipart)

    def say(message: Any) -> None:
        router.send_multipart([identity, msgspec.msgpack.encode(message)])

    say(STATUS)
    await client.wait_until_ready(120)
    yield client, say
    await client.close()
    context.destroy(linger=0)


@contextmanager
def speaking(endpoint: str) -> Iterator[Say]:
    """An engine that says what it is made to, to whoever asks it something; it dies with the
    block, once all that it said has left."""
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.bind(endpoint)

    def say(message: Any) -> None:
        identity, _ = router.recv_multipart()
        router.send_multipart([identity, msgspec.msgpack.encode(message)])

    yield say
    context.destroy(linger=120_000)


@pytest.mark.parametrize("count", range(4))
async def test_an_engine_that_dies_between_any_two_messages_is_told_of_and_its_successor_heard(
    endpoint: str, make_request: MakeRequest, count: int
) -> None:
    """After none, its status, a token, and the last one."""
    request = make_request(max_tokens=2)
    first, last = (
        Outputs([Output(request.id, 0, bytes(4), finish_reason=reason)])
        for reason in (None, "length")
    )
    client = EngineClient(endpoint, heartbeat_s=0.02, engine_timeout_s=inf)
    await client.connect()
    with speaking(endpoint) as say:
        if count:
            await asyncio.to_thread(say, STATUS)
            await client.wait_until_ready(120)
            asked = asyncio.create_task(collect(client, request))
            await asyncio.sleep(0)  # lets it send
        for message in (first, last)[: count - 1] if count else ():
            await asyncio.to_thread(say, message)
    if count == 3:
        assert [output.finish_reason for output in await asked] == [None, "length"]
    elif count:
        with pytest.raises(EngineUnavailable, match="connection to the engine was lost"):
            await asked
    await until(lambda: client.status is None)
    with speaking(endpoint) as say:
        await asyncio.to_thread(say, STATUS)
        await client.wait_until_ready(120)
    await client.close()


@pytest.mark.parametrize("count", range(1, 6))
def test_a_client_that_dies_anywhere_leaves_nothing_behind(
    serve: Serve, endpoint: str, make_request: MakeRequest, tmp_path: Path, count: int
) -> None:
    served = serve(make_engine=HeldEngine, model=tmp_path)
    results = [
        Hello(),
        make_request("a", n=3, max_tokens=60),
        StopSamples("a", bytes(4)),
        TakeSnapshot("b"),
        LoadWeights("c", str(tmp_path / "none"), "finish", is_staged=True),
    ]
    with held(tmp_path):
        client = RawClient(endpoint)
        client.send(*results[:count], Hello())
        while not isinstance(client.receive(), Status):
            pass
        client.close()
        process = served.process
        process.clients.timeout_s = 0.0
        wait_until(
            lambda: not (list(process.clients) or process._owner or process.weight_reload.current)
        )
        assert not served.engine.has_work and not served.engine.scheduler.is_held
        process.clients.timeout_s = 120.0
        other = RawClient(endpoint)
        other.send(Hello())
        status = other.receive()
        assert isinstance(status, Status) and (status.running, status.waiting) == (0, 0)
        other.close()


def test_an_engine_with_much_to_read_says_that_it_is_there(
    serve: Serve, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Hello behind 80,000 requests and as many Aborts was answered after more than 10 s: all
    streams of the API process ended, and it took no requests."""
    monkeypatch.setattr("srm.engine.process.process.MAX_INBOX", 1)
    serve()
    client = RawClient(endpoint)
    for _ in range(3):
        client.send(Abort("unknown"))
        assert isinstance(client.receive(), Status)
    client.close()


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


LIES = {
    "rows of nobody": OF_NOBODY,
    "half a row": Outputs([], [bytes(7), bytes(4), bytes(1), b"", b"\0", b"", b""]),
}


@pytest.mark.parametrize("what", LIES)
async def test_an_error_in_what_listens_to_the_engine_is_told_to_whoever_depends_on_it(
    endpoint: str, what: str
) -> None:
    results: list[tuple[str, Exception]] = []
    async with heard_once(endpoint, 1000, lambda *failed: results.append(failed)) as (_, say):
        say(LIES[what])
        await until(lambda: bool(results))
        assert results[0][0] == "what listens to the engine"
        assert "engine client" not in {task.get_name() for task in asyncio.all_tasks()}


def test_an_api_process_that_cannot_listen_to_the_engine_ends_itself(
    endpoint: str, text_model: Path
) -> None:
    """It lived, said that it was well, and answered nothing."""
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.bind(endpoint)
    command = [sys.executable, "-m", "srm.server", "api", f"--model={text_model}", "--port=0"]
    with subprocess.Popen(
        [*command, f"--endpoint={endpoint}"], cwd=ROOT, stderr=subprocess.PIPE, text=True
    ) as api:
        try:
            lie(router)
            _, log = api.communicate(timeout=120)
        finally:
            api.kill()
    context.destroy(linger=0)
    assert api.returncode == 1
    assert "what listens to the engine failed, which nothing here works without" in log
    assert "AssertionError: rows of somebody else" in log


async def test_whoever_has_an_engine_of_its_own_gets_the_error_and_does_not_wait_for_ever() -> None:
    async def work(_: EngineClient) -> None:
        await asyncio.Event().wait()

    async with asyncio.timeout(120):
        with pytest.raises(AssertionError, match="rows of somebody else"):
            await with_engine(EngineConfig(), "tests.kit.processes.lying_engine", work)
