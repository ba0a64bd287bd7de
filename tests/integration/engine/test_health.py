"""Whether an engine is ready that hangs in a step or drains, and what progress it tells."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator

import pytest

from srm.engine.client.client import EngineClient
from srm.engine.process.engine import Engine
from srm.engine.process.process import EngineProcess
from srm.engine.weights.weights import Weights
from srm.engine.wiring import EngineWiring
from srm.errors import EngineUnavailable
from srm.server.routes.health import check_ready
from tests.conftest import MakeRequest
from tests.kit.engines.numpy_runner import NumpyLaunched, NumpyRunner
from tests.kit.engines.served_engine import Serve, collect, connected, until

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


async def until_it_says(client: EngineClient, is_wanted: Callable[[str], bool]) -> str:
    """Why it is not ready, once that is as wanted; empty if it is ready."""
    reason = ""

    def is_so() -> bool:
        nonlocal reason
        try:
            check_ready(client, STALL_S)
            reason = ""
        except EngineUnavailable as error:
            reason = error.message
        return is_wanted(reason)

    await until(is_so)
    return reason


async def test_an_engine_that_hangs_in_a_step_is_not_ready_until_it_goes_on(
    serve: Serve, endpoint: str, make_request: MakeRequest, gate: threading.Event
) -> None:
    served = serve(HangingRunner)
    async with connected(endpoint, heartbeat_s=HEARTBEAT_S) as client:
        gate.clear()
        running = asyncio.create_task(collect(client, make_request(max_tokens=5)))
        await until(lambda: served.engine.has_work)
        reason = await until_it_says(client, lambda reason: "hangs in the step" in reason)
        assert "stalled" in reason and f"stall_s = {STALL_S}" in reason
        gate.set()
        await until_it_says(client, lambda reason: not reason)
        assert (await running)[-1].finish_reason == "length"


async def test_a_draining_engine_is_not_ready(
    serve: Serve, endpoint: str, make_request: MakeRequest
) -> None:
    served = serve()
    async with connected(endpoint, heartbeat_s=HEARTBEAT_S) as client:
        running = asyncio.create_task(collect(client, make_request(n=90, max_tokens=60)))
        await until(lambda: served.engine.has_work)
        served.process.drain()
        await until_it_says(client, lambda reason: reason == "the engine is draining")
        await running
        reason = await until_it_says(client, lambda reason: "draining" not in reason)
        assert "does not answer" in reason


async def test_progress_is_told_while_steps_go_on_and_while_there_are_none(
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
