"""A change of weights on two engines, cut between any two of its messages: one version in the end.

Whoever asks, an engine or the process that drives the change goes, freezes or is restarted there.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from srm.engine.client.client import EngineClient
from srm.engine.messages import Done, FromEngine, LoadWeights, PutWeights, ToEngine
from srm.engine.process.engine import Engine
from srm.engine.process.weights_note import first_weights
from srm.engine.weights.weights import Weights
from srm.engine.wiring import EngineWiring
from srm.errors import EngineUnavailable, SRMError, SwapInProgress
from tests.kit.engines.making import request_of
from tests.kit.engines.numpy_runner import NumpyRunner
from tests.kit.engines.served_engine import (
    NUM_SLOTS,
    RawClient,
    Served,
    collect,
    connected_to_all,
    endpoint_of,
    num_away,
    until,
)
from tests.kit.processes.numpy_engine import load, seed_folder

POINTS = (
    "before it hears of it",
    "before it says staged",
    "after it said staged",
    "before it puts",
    "after it put",
    "after it said so",
)


class Killed(BaseException):
    """As by SIGKILL: nothing more is said, not even why."""


class Cut(Served):
    """An engine to which something happens at one point of a change."""

    at = ""
    heard = 0
    """Messages that begin or make a change."""

    _act: Callable[[], object] | None = None

    def cut(self, point: str, act: Callable[[], object]) -> None:
        self.at, self._act = point, act

    def run(self) -> None:
        clients = self.process.clients
        receive, send = clients.receive, clients.send
        num_new = 0

        def reach(point: str) -> None:
            if point and point == self.at:
                self.at = ""
                assert self._act is not None
                self._act()

        def received() -> tuple[bytes, bytes] | None:
            nonlocal num_new
            self.heard += num_new  # it asks for the next one, so it is through with these
            num_new = 0
            if (item := receive()) is not None:
                message: Any = msgspec.msgpack.decode(item[1], type=ToEngine)
                reach(POINTS[0] if isinstance(message, LoadWeights) else "")
                reach(POINTS[3] if isinstance(message, PutWeights) else "")
                num_new = isinstance(message, LoadWeights | PutWeights)
            return item

        def sent(client: bytes, payload: bytes) -> bool:
            message: Any = msgspec.msgpack.decode(payload, type=FromEngine)
            is_put = isinstance(message, Done) and "seconds" in message.detail
            if isinstance(message, Done):
                reach(POINTS[4 if is_put else 1])
            is_sent = send(client, payload)
            if isinstance(message, Done):
                reach(POINTS[5 if is_put else 2])
            return is_sent

        clients.receive = received  # type: ignore[method-assign]
        clients.send = sent  # type: ignore[method-assign,assignment]
        try:
            super().run()
        except Killed:
            self.exit_code = -9


class Fleet:
    """Two engines with one note, which are started again as the supervisor does it."""

    def __init__(self, folder: Path) -> None:
        self.endpoint = f"ipc://{folder}/engine"
        self._folder, self._model = folder, seed_folder(folder / "model", 0)
        self.new = str(seed_folder(folder / "new", 3))
        self._note = os.memfd_create("note")
        self.engines = [self._start(number) for number in (0, 1)]
        self.starts = 2

    def _start(self, number: int) -> Cut:
        config = EngineWiring(
            model=self._model,
            num_slots=NUM_SLOTS,
            max_step_rows=8,
            max_step_tokens=32,
            endpoint=endpoint_of(self.endpoint, number),
            weights_note_fd=self._note,
            weights_copies=str(self._folder / "copies"),
            snapshot_dir=str(self._folder / f"snapshots {number}"),
        )
        weights, note = first_weights(config, load)
        runner = NumpyRunner(weights, NUM_SLOTS)
        engine = Engine(weights.config, runner, config, note.fingerprint, note.weights_version)
        return Cut(engine, config, 120)

    def restart(self) -> None:
        """Start those again that have ended."""
        for number, engine in enumerate(self.engines):
            if engine.exit_code is not None:
                self.engines[number] = self._start(number)
                self.starts += 1

    @property
    def in_use(self) -> list[tuple[int, str]]:
        engines = [engine.engine.status() for engine in self.engines]
        return [(engine.weights_version, engine.fingerprint) for engine in engines]

    async def settle(self) -> tuple[int, str]:
        """What all use once nothing is staged any more, and every engine lives."""

        def has_settled() -> bool:
            self.restart()
            is_free = not any(engine.process.weight_reload.current for engine in self.engines)
            return is_free and len(set(self.in_use)) == 1

        await until(has_settled)
        assert not any(engine.engine.scheduler.is_held for engine in self.engines)
        return self.in_use[0]

    async def assert_serves(self, client: EngineClient) -> None:
        """Requests are answered, and the next change is made by all."""
        await until(lambda: not num_away(client))
        assert len(await collect(client, request_of("a", n=32, max_tokens=3))) == 32
        version, _ = self.in_use[0]
        async with asyncio.timeout(120):
            done = await client.load_weights(str(seed_folder(self._folder / "next", 5)), "finish")
        assert done.detail["weights_version"] == version + 1
        assert set(self.in_use) == {(version + 1, "tiny-5")}

    def stop(self) -> None:
        for engine in self.engines:
            engine.process.drain()
            engine.process.drain()
            engine.join()


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    made = Fleet(tmp_path)
    yield made
    made.stop()


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("fate", ["is killed", "freezes"])
@pytest.mark.parametrize("number", [0, 1])
async def test_an_engine_goes_in_the_middle_of_a_change(
    fleet: Fleet, number: int, fate: str, point: str
) -> None:
    go_on = threading.Event()

    def kill() -> None:
        raise Killed

    victim = fleet.engines[number]
    victim.cut(point, kill if fate == "is killed" else lambda: go_on.wait(120))
    limit_s = 120 if fate == "is killed" else 0.5
    try:
        async with connected_to_all(fleet.endpoint, engine_timeout_s=limit_s) as client:
            async with asyncio.timeout(120):
                try:
                    message: Any = await client.load_weights(fleet.new, "finish")
                except SRMError as error:
                    message = error
                await until(lambda: not victim.at)  # it may be answered before this engine is cut
                await until(lambda: num_away(client) == 1)
                # The other one does not wait for it.
                assert len(await collect(client, request_of("b", n=32, max_tokens=3))) == 32
            go_on.set()
            client.engines[number].engine_timeout_s = 120
            version, fingerprint = await fleet.settle()
            assert (version, fingerprint) in {(1, "tiny-0"), (2, "tiny-3")}
            if isinstance(message, Done):
                assert version == message.detail["weights_version"] == 2
            elif "not known" not in str(message):
                assert version == 1, message
            await fleet.assert_serves(client)
    finally:
        go_on.set()


@pytest.mark.parametrize("unable", [[0], [1], [0, 1]])
async def test_weights_that_an_engine_cannot_put_to_use(fleet: Fleet, unable: list[int]) -> None:
    """Where no engine can, nothing changes; else it is too late, and who cannot starts again."""

    def fail(_weights: Weights) -> None:
        raise ValueError("out of memory")

    for number in unable:
        fleet.engines[number].engine.runner.use_weights = fail  # type: ignore[method-assign,assignment]
    async with connected_to_all(fleet.endpoint) as client:
        if len(unable) > 1:
            with pytest.raises(SRMError, match="cannot be put to use"):
                await client.load_weights(fleet.new, "continue")
            assert (await fleet.settle(), fleet.starts) == ((1, "tiny-0"), 2)
        else:
            done = await client.load_weights(fleet.new, "continue")
            assert done.detail["weights_version"] == 2
            assert (await fleet.settle(), fleet.starts) == ((2, "tiny-3"), 3)
            await fleet.assert_serves(client)


async def test_an_engine_that_dies_once_it_is_staged_holds_nobody(fleet: Fleet) -> None:
    """Before the other one is staged, so that nobody is told to put the weights to use."""
    is_lost = threading.Event()

    def kill() -> None:
        raise Killed

    slow, victim = fleet.engines
    slow.cut(POINTS[1], lambda: is_lost.wait(120))
    victim.cut(POINTS[2], kill)
    async with connected_to_all(fleet.endpoint) as client, asyncio.timeout(120):
        change = asyncio.create_task(client.load_weights(fleet.new, "finish"))
        await until(lambda: num_away(client) == 1)
        is_lost.set()
        with pytest.raises(EngineUnavailable):
            await change
        assert len(await collect(client, request_of("b", n=32, max_tokens=3))) == 32
        assert await fleet.settle() == (1, "tiny-0")
        await fleet.assert_serves(client)


@pytest.mark.parametrize("text", range(5))
async def test_a_client_killed_between_messages_leaves_a_version(fleet: Fleet, text: int) -> None:
    """After so many of: load to each engine, put to each."""
    for engine in fleet.engines:
        engine.process.weight_reload.lease_s = 0.5
    async with (
        connected_to_all(fleet.endpoint) as dying,
        connected_to_all(fleet.endpoint) as client,
    ):
        left = text

        def cut(send: Callable[[Any], None]) -> Callable[[Any], None]:
            def cut_send(message: Any) -> None:
                nonlocal left
                left -= isinstance(message, LoadWeights | PutWeights)
                if left >= 0:
                    send(message)

            return cut_send

        for connection in dying.engines:
            connection.send = cut(connection.send)  # type: ignore[method-assign,assignment]
        change = asyncio.create_task(dying.load_weights(fleet.new, "finish"))
        await until(lambda: left < 0 or change.done())
        await until(lambda: sum(engine.heard for engine in fleet.engines) == text)
        assert await fleet.settle() == ((2, "tiny-3") if text > 2 else (1, "tiny-0"))
        assert fleet.starts == 2, "who is behind has them staged, and starts nothing anew"
        change.cancel()
        for engine in fleet.engines:
            engine.process.weight_reload.lease_s = 120
        await fleet.assert_serves(client)


async def test_a_client_that_asked_for_weights_may_leave(fleet: Fleet) -> None:
    go_on = threading.Event()
    slow = fleet.engines[1]
    slow.cut(POINTS[1], lambda: go_on.wait(120))
    async with connected_to_all(fleet.endpoint) as client:
        asked = asyncio.create_task(client.load_weights(fleet.new, "finish"))
        await until(lambda: fleet.engines[0].process.weight_reload.is_prepared)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        with pytest.raises(SwapInProgress):
            await client.load_weights(fleet.new, "finish")
        go_on.set()
        await until(lambda: set(fleet.in_use) == {(2, "tiny-3")})
        await fleet.assert_serves(client)


async def test_a_drain_and_a_snapshot_in_the_middle_of_a_change(fleet: Fleet) -> None:
    go_on = threading.Event()
    staged, slow = fleet.engines
    slow.cut(POINTS[1], lambda: go_on.wait(120))
    async with connected_to_all(fleet.endpoint) as client, asyncio.timeout(120):
        asked = asyncio.create_task(client.load_weights(fleet.new, "finish"))
        await until(lambda: staged.process.weight_reload.is_prepared)
        snapshot = asyncio.create_task(client.snapshot())
        await until(lambda: bool(client.status and client.status.held_s))
        assert client.status is not None and client.status.changing == fleet.new
        staged.process.drain()
        with pytest.raises(EngineUnavailable, match=r"engine 0 .*drains: no weights are changed"):
            await asked
        go_on.set()
        await asyncio.gather(snapshot, return_exceptions=True)  # of an engine that goes: either
        assert await fleet.settle() == (1, "tiny-0")
        await fleet.assert_serves(client)


def test_staged_weights_are_dropped_once_nobody_wants_them(fleet: Fleet) -> None:
    """Though the client lives and says hello: it may have forgotten them."""
    raw = RawClient(fleet.endpoint)
    try:
        message = LoadWeights("a", fleet.new, "finish", is_staged=True)
        raw.send(message)
        staged: Any = raw.receive()
        assert (staged.id, staged.detail) == ("a", {"weights_version": 2})
        assert fleet.engines[0].engine.scheduler.is_held
        fleet.engines[0].process.weight_reload.lease_s = 0.0
        refusal: Any = raw.receive()
        assert refusal.id == "a" and refusal.code == "engine_unavailable"
        raw.send(PutWeights("a"))
        refusal = raw.receive()
        assert "no weights of this id" in refusal.message
        assert not fleet.engines[0].engine.scheduler.is_held
    finally:
        raw.close()
