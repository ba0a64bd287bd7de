"""Sending: an engine that is away is waited for, and what kills it is found."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.client.client import EngineClient
from engine.errors import (
    EngineUnavailable,
    IdInUse,
    InvalidRequest,
    NotFinite,
    Overloaded,
    StepFailed,
)
from server.batch import engine_retry
from server.batch.engine_retry import MAX_ALONE, MAX_BREAKS, MAX_DEATHS, EngineRetry


class Engine:
    """As much of a client as is looked at; it comes back a moment after each death."""

    def __init__(self) -> None:
        self.status: Any = SimpleNamespace(state="ready")
        self.losses = 0
        self.is_closed = False

    def go(self) -> None:
        self.losses += 1
        self.status = None
        asyncio.get_running_loop().call_later(0.001, self._come_back)

    async def die(self) -> None:
        """Raises what a line that is in flight meets."""
        self.go()
        raise EngineUnavailable("gone")

    def _come_back(self) -> None:
        self.status = SimpleNamespace(state="ready")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_retry, "_POLL_S", 0.001)
    monkeypatch.setattr(engine_retry, "_LONGEST_PAUSE_S", 0.001)
    monkeypatch.setattr(engine_retry, "_LONGEST_WATCH_S", 0.0)


def run(work: Callable[[Engine, EngineRetry], Awaitable[None]]) -> None:
    async def main() -> None:
        engine = Engine()
        await asyncio.wait_for(work(engine, EngineRetry(cast(EngineClient, engine))), 120)

    asyncio.run(main())


def test_an_engine_that_is_not_there_is_waited_for() -> None:
    async def work(engine: Engine, turns: EngineRetry) -> None:
        engine.status = SimpleNamespace(state="draining")
        asked = False

        async def ask() -> int:
            nonlocal asked
            asked = True
            return 5

        task = asyncio.create_task(turns.until_answered(ask))
        await asyncio.sleep(0.02)
        assert not asked
        engine.status = SimpleNamespace(state="ready")
        assert await task == 5

    run(work)


@pytest.mark.parametrize(
    "error", [EngineUnavailable("drains"), NotFinite("step"), Overloaded("full"), IdInUse("used")]
)
def test_what_passes_is_tried_again(error: Exception) -> None:
    async def work(_engine: Engine, turns: EngineRetry) -> None:
        errors = [error] * 3

        async def ask() -> int:
            if errors:
                raise errors.pop()
            return 5

        assert await turns.until_answered(ask) == 5

    run(work)


def test_a_request_at_fault_is_told_at_once() -> None:
    async def work(_engine: Engine, turns: EngineRetry) -> None:
        async def ask() -> None:
            raise InvalidRequest("n", "n")

        with pytest.raises(InvalidRequest):
            await turns.until_answered(ask)

    run(work)


def test_what_breaks_the_model_every_time_is_given_up() -> None:
    async def work(_engine: Engine, turns: EngineRetry) -> None:
        count = 0

        async def ask() -> None:
            nonlocal count
            count += 1
            raise NotFinite("no numbers")

        with pytest.raises(NotFinite):
            await turns.until_answered(ask)
        assert count == MAX_BREAKS

    run(work)


def test_the_line_that_kills_the_engine_is_found_and_takes_no_other_along() -> None:
    async def work(engine: Engine, turns: EngineRetry) -> None:
        flying = 0
        alone: list[bool] = []

        async def poison() -> None:
            alone.append(flying == 0)
            await asyncio.sleep(0.001)
            await engine.die()

        async def victim() -> int:
            nonlocal flying
            flying += 1
            try:
                for _ in range(5):
                    await asyncio.sleep(0.001)
                    if engine.status is None:
                        raise EngineUnavailable("gone")
                return 5
            finally:
                flying -= 1

        others = [asyncio.create_task(turns.until_answered(victim)) for _ in range(8)]
        with pytest.raises(EngineUnavailable):
            await turns.until_answered(poison)
        assert len(alone) == engine.losses == MAX_DEATHS + MAX_ALONE
        assert all(alone[-MAX_ALONE:])
        assert await asyncio.gather(*others) == [5] * 8

    run(work)


def test_a_line_that_survives_alone_is_answered() -> None:
    async def work(engine: Engine, turns: EngineRetry) -> None:
        async def ask() -> int:
            if engine.losses < MAX_DEATHS:
                await engine.die()
            return 5

        assert await turns.until_answered(ask) == 5

    run(work)


@pytest.mark.parametrize("how", [EngineUnavailable, StepFailed])
def test_a_line_is_answered_however_often_another_request_kills_the_engine(
    monkeypatch: pytest.MonkeyPatch, how: type[EngineUnavailable | StepFailed]
) -> None:
    """One that is not ours: it does so with the line in flight, alone, and without it."""
    asked = watched = 0

    async def work(engine: Engine, turns: EngineRetry) -> None:
        async def watch(_turns: EngineRetry, _seconds: float) -> None:
            nonlocal watched
            watched += 1
            engine.go()

        monkeypatch.setattr(EngineRetry, "_watch", watch)

        async def ask() -> int:
            nonlocal asked
            await asyncio.sleep(0)
            asked += 1
            if asked == 5 * (MAX_DEATHS + MAX_ALONE):
                return 5
            if how is StepFailed:  # its last words come before it is gone
                asyncio.get_running_loop().call_soon(engine.go)
            else:
                engine.go()
            raise how("gone")

        assert await turns.until_answered(ask) == 5

    run(work)
    assert watched > 1


def test_one_death_counts_once_whatever_is_asked_of_the_dying() -> None:
    async def work(engine: Engine, turns: EngineRetry) -> None:
        asked = 0

        async def ask() -> int:
            nonlocal asked
            asked += 1
            if asked == 3 * MAX_DEATHS:
                return 5
            raise StepFailed("the engine failed")

        assert await turns.until_answered(ask) == 5  # and was never tried alone

    run(work)


def test_a_stop_while_a_line_is_tried_alone_is_no_answer_to_it() -> None:
    async def work(engine: Engine, turns: EngineRetry) -> None:
        is_alone = asyncio.Event()

        async def ask() -> int:
            if engine.losses < MAX_DEATHS:
                await engine.die()
            is_alone.set()
            while not engine.is_closed:
                await asyncio.sleep(0)
            raise EngineUnavailable("the connection to the engine was closed")

        task = asyncio.create_task(turns.until_answered(ask))
        await is_alone.wait()
        engine.is_closed, engine.status = True, None
        for _ in range(100):
            await asyncio.sleep(0)
        assert not task.done()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(work)
