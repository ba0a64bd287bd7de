"""/ready against an engine that hangs in a step, makes none, drains or is stopped; /health too."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from engine.client.client import EngineClient
from engine.config import EngineConfig
from engine.errors import SRMError
from engine.process.engine import Engine
from engine.process.process import EngineProcess
from engine.weights.weights import Weights
from server import errors
from server.http.draining import Draining
from server.routes import health
from tests.conftest import MakeRequest
from tests.engines.numpy_runner import NumpyLaunched, NumpyRunner
from tests.engines.served_engine import Serve, collect, connected, until
from tests.serving import SERVER_FLAGS, Server, children, complete, error_of, wait_until

STALL_S = 0.3
HEARTBEAT_S = 0.02


class HangingRunner(NumpyRunner):
    """Its steps end only while the gate is open."""

    gate = threading.Event()

    def run_until(self, launched: NumpyLaunched) -> None:
        self.gate.wait()
        super().run_until(launched)


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    HangingRunner.gate.set()
    yield HangingRunner.gate
    HangingRunner.gate.set()


class Probe:
    """Asks the routes of one API process."""

    def __init__(self, client: EngineClient) -> None:
        self.client = client
        app = FastAPI()
        app.add_exception_handler(SRMError, errors.srm_error)
        app.include_router(health.routes(client, STALL_S, Draining()))
        self._http = httpx.AsyncClient(
            transport=httpx.ASGITransport(app=app), base_url="http://test"
        )

    async def reason(self) -> str:
        """Why it is not ready; empty if it is."""
        assert (await self._http.get("/health")).status_code == 200
        reply = await self._http.get("/ready")
        if reply.status_code == 200:
            return ""
        assert reply.status_code == 503
        assert int(reply.headers["retry-after"]) >= 1
        return str(reply.json()["error"]["message"])

    async def until(self, is_wanted: Callable[[str], bool]) -> str:
        async with asyncio.timeout(120):
            while not is_wanted(reason := await self.reason()):
                await asyncio.sleep(0.01)
        return reason


@asynccontextmanager
async def probing(endpoint: str) -> AsyncIterator[Probe]:
    async with connected(endpoint, heartbeat_s=HEARTBEAT_S) as client:
        yield Probe(client)


async def test_an_engine_that_hangs_in_a_step_is_not_ready_until_it_goes_on(
    serve: Serve, endpoint: str, make_request: MakeRequest, gate: threading.Event
) -> None:
    served = serve(HangingRunner)
    async with probing(endpoint) as probe:
        gate.clear()
        running = asyncio.create_task(collect(probe.client, make_request(max_tokens=5)))
        await until(lambda: served.engine.has_work)
        reason = await probe.until(lambda reason: "hangs in the step" in reason)
        assert "stalled" in reason
        assert f"stall_s = {STALL_S}" in reason
        gate.set()
        await probe.until(lambda reason: not reason)
        assert (await running)[-1].finish_reason == "length"


async def test_a_draining_engine_is_not_ready(
    serve: Serve, endpoint: str, make_request: MakeRequest, gate: threading.Event
) -> None:
    served = serve()
    async with probing(endpoint) as probe:
        running = asyncio.create_task(collect(probe.client, make_request(n=90, max_tokens=60)))
        await until(lambda: served.engine.has_work)
        served.process.drain()
        await probe.until(lambda reason: reason == "the engine is draining")
        await running
        assert "does not answer" in await probe.until(lambda reason: "draining" not in reason)


def test_an_engine_process_that_is_stopped_or_dies_is_not_ready_until_it_goes_on(
    text_model: Path,
) -> None:
    def reason() -> str:
        reply = server.get("/ready")
        return "" if reply.status_code == 200 else str(error_of(reply, 503)["message"])

    with Server(text_model, *SERVER_FLAGS, "--stall-s=2") as server:
        engine = children(server)["engine"]
        os.kill(engine, signal.SIGSTOP)
        try:
            wait_until(lambda: "answer" in reason())
            assert server.get("/health").status_code == 200
        finally:
            os.kill(engine, signal.SIGCONT)
        wait_until(lambda: not reason())
        complete(server, n=3, max_tokens=5, ignore_eos=True)
        assert "srm_engine_free_slots 64.0" in server.get("/metrics").text
        assert "vllm:num_requests_running{" in server.get("/metrics").text
        # Gauges of a dead engine go and its counters stay.
        os.kill(engine, signal.SIGKILL)
        wait_until(lambda: "\nsrm_engine_free_slots" not in server.get("/metrics").text)
        assert "vllm:num_requests_running{" not in server.get("/metrics").text
        assert server.metric("srm_engine_decode_tokens_total") == 15
        wait_until(lambda: not reason())
        complete(server, max_tokens=5, ignore_eos=True)
        assert server.metric("srm_engine_decode_tokens_total") == 20
        assert server.metric("srm_engine_free_slots") == 64


async def test_progress_is_told_while_steps_go_on_and_while_there_are_none(
    weights: Weights, endpoint: str, make_request: MakeRequest
) -> None:
    config = EngineConfig(endpoint=endpoint, num_slots=8)
    engine = Engine(weights.config, NumpyRunner(weights, 8), config)
    told: list[int] = []
    process = EngineProcess(engine, config, progress=lambda: told.append(engine.num_steps))
    running = threading.Thread(target=process.run)
    running.start()
    try:
        async with connected(endpoint) as client:
            await until(lambda: told.count(0) >= 3)
            await collect(client, make_request(max_tokens=20))
        assert len(set(told)) > 20
    finally:
        process.drain()
        running.join()
