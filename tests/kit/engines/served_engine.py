"""An EngineProcess on the numpy runner in a thread, and the ways to speak to it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import zmq

from srm.engine.client.client import EngineClient
from srm.engine.messages import FromEngine, Output, Request
from srm.engine.process.engine import Engine
from srm.engine.process.process import EngineProcess
from srm.engine.steps.batch import Batch
from srm.engine.wiring import EngineWiring
from tests.kit.engines.numpy_runner import NumpyLaunched, NumpyRunner
from tests.kit.processes.numpy_engine import load

NUM_SLOTS = 8


class Served:
    """An EngineProcess in a thread."""

    def __init__(self, engine: Engine, config: EngineWiring, client_timeout_s: float) -> None:
        self.engine = engine
        self.process = EngineProcess(engine, config, client_timeout_s, load=load)
        self.exit_code: int | None = None
        self._thread = threading.Thread(target=self.run, daemon=True)
        self._thread.start()

    def run(self) -> None:
        """What its thread does."""
        self.exit_code = self.process.run()

    def join(self) -> int | None:
        self._thread.join(120)
        return self.exit_code


Serve = Callable[..., Served]


def endpoint_of(endpoint: str, number: int) -> str:
    """Where the engine of this number listens, if the first one does at `endpoint`."""
    return f"{endpoint}.{number}" if number else endpoint


@asynccontextmanager
async def connected(
    endpoint: str, ready_s: float = 120, **settings: float
) -> AsyncIterator[EngineClient]:
    client = EngineClient(endpoint, **{"engine_timeout_s": 120, **settings})
    await client.connect()
    try:
        await client.wait_until_ready(ready_s)
        yield client
    finally:
        await client.close()


@asynccontextmanager
async def connected_to_all(
    endpoint: str, count: int = 2, **settings: float
) -> AsyncIterator[EngineClient]:
    """A client of so many engines, once all of them have answered."""
    endpoints = ",".join(endpoint_of(endpoint, number) for number in range(count))
    async with connected(endpoints, **{"heartbeat_s": 0.02, **settings}) as client:
        await until(lambda: not num_away(client))
        yield client


async def collect(client: EngineClient, request: Request) -> list[Output]:
    return [output async for output in client.generate(request)]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not condition():
            await asyncio.sleep(0.01)


def breaks_at(number: int) -> type[NumpyRunner]:
    """A device that fails on the step of this number."""

    class Breaks(NumpyRunner):
        steps = 0

        def launch(self, batch: Batch) -> NumpyLaunched:
            self.steps += 1
            if self.steps == number:
                raise RuntimeError("the device fell off the bus")
            return super().launch(batch)

    return Breaks


class RawClient:
    """Speaks to the engine in bytes, like a client with a fault."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.connect(endpoint)

    def send(self, *messages: msgspec.Struct) -> None:
        for message in messages:
            self.socket.send(msgspec.msgpack.encode(message))

    def receive(self) -> FromEngine:
        assert self.socket.poll(120_000), "the engine did not answer"
        message: FromEngine = msgspec.msgpack.decode(self.socket.recv(), type=FromEngine)
        return message

    def close(self) -> None:
        self._context.destroy(linger=0)


def num_away(client: EngineClient) -> int:
    """How many engines do not answer."""
    return sum(engine.status is None for engine in client.engines)
