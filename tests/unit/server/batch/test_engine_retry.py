"""Sending: an engine that is away is waited for, and what kills it is found."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import pytest

from srm import errors
from srm.engine.client.client import EngineClient
from srm.errors import EngineUnavailable, StepFailed
from srm.server.batch import engine_retry
from srm.server.batch.engine_retry import MAX_ALONE, MAX_BREAKS, MAX_DEATHS, EngineRetry
from srm.server.errors import NotFinite

READY = SimpleNamespace(state="ready")


class Engine:
    """As much of a client as is looked at; it comes back a moment after each death."""

    status: Any = READY
    losses = 0
    is_closed = False

    def go(self) -> None:
        self.losses += 1
        self.status = None
        asyncio.get_running_loop().call_later(0.001, setattr, self, "status", READY)

    def die(self) -> NoReturn:
        """In the middle of a request."""
        self.go()
        raise EngineUnavailable("gone")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_retry, "_POLL_S", 0.001)
    monkeypatch.setattr(engine_retry, "_LONGEST_PAUSE_S", 0.001)
    monkeypatch.setattr(engine_retry, "_LONGEST_WATCH_S", 0.0)


@pytest.fixture
def engine() -> Engine:
    return Engine()


Ask = Callable[[], Awaitable[int]]
Answer = Callable[[Ask], Coroutine[Any, Any, int]]


@pytest.fixture
def answer(engine: Engine) -> Answer:
    turns = EngineRetry(cast(EngineClient, engine))
    return lambda ask: asyncio.wait_for(turns.until_answered(ask), 120)


async def test_an_engine_that_is_not_there_is_waited_for(engine: Engine, answer: Answer) -> None:
    engine.status, states = SimpleNamespace(state="draining"), []

    async def ask() -> int:
        states.append(engine.status.state)
        return 5

    task = asyncio.create_task(answer(ask))
    for _ in range(20):
        await asyncio.sleep(0.001)
    engine.status = READY
    assert await task == 5 and states == ["ready"]


@pytest.mark.parametrize(
    ("error", "times", "is_raised"),
    [
        (EngineUnavailable("drains"), 3, False),
        (errors.Overloaded("full"), 3, False),
        (errors.IdInUse("used"), 3, False),
        (NotFinite("step"), MAX_BREAKS - 1, False),
        (NotFinite("step"), MAX_BREAKS, True),
        (errors.InvalidRequest("n", "n"), 1, True),
    ],
)
async def test_what_passes_is_tried_again(
    answer: Answer, error: Exception, times: int, is_raised: bool
) -> None:
    met = [error] * times

    async def ask() -> int:
        if met:
            raise met.pop()
        return 5

    if is_raised:
        with pytest.raises(type(error)):
            await answer(ask)
    else:
        assert await answer(ask) == 5
    assert not met


async def test_finds_the_line_that_kills_the_engine(engine: Engine, answer: Answer) -> None:
    flying = 0
    alone: list[bool] = []

    async def poison() -> int:
        alone.append(flying == 0)
        await asyncio.sleep(0.001)
        engine.die()

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

    others = [asyncio.create_task(answer(victim)) for _ in range(8)]
    with pytest.raises(EngineUnavailable):
        await answer(poison)
    assert len(alone) == engine.losses == MAX_DEATHS + MAX_ALONE
    assert all(alone[-MAX_ALONE:])
    assert await asyncio.gather(*others) == [5] * 8


async def test_a_line_that_survives_alone_is_answered(engine: Engine, answer: Answer) -> None:
    async def ask() -> int:
        if engine.losses < MAX_DEATHS:
            engine.die()
        return 5

    assert await answer(ask) == 5


@pytest.mark.parametrize("how", [EngineUnavailable, StepFailed])
async def test_answers_a_line_however_often_the_engine_dies(
    engine: Engine,
    answer: Answer,
    monkeypatch: pytest.MonkeyPatch,
    how: type[EngineUnavailable | StepFailed],
) -> None:
    """One that is not ours: it does so with the line in flight, alone, and without it."""
    asked = watched = 0

    async def watch(_retry: EngineRetry, _seconds: float) -> None:
        nonlocal watched
        watched += 1
        engine.go()

    async def ask() -> int:
        nonlocal asked
        await asyncio.sleep(0)
        asked += 1
        if asked == 5 * (MAX_DEATHS + MAX_ALONE):
            return 5
        if how is EngineUnavailable:
            engine.die()
        asyncio.get_running_loop().call_soon(engine.go)  # its last words come before it is gone
        raise StepFailed("gone")

    monkeypatch.setattr(EngineRetry, "_watch", watch)
    assert await answer(ask) == 5
    assert watched > 1


async def test_one_death_counts_once_whatever_is_asked_of_the_dying(answer: Answer) -> None:
    asked = 0

    async def ask() -> int:
        nonlocal asked
        asked += 1
        if asked == 3 * MAX_DEATHS:
            return 5
        raise StepFailed("the engine failed")

    assert await answer(ask) == 5  # and was never tried alone


async def test_a_stop_is_no_answer_to_a_line_tried_alone(engine: Engine, answer: Answer) -> None:
    is_alone = asyncio.Event()

    async def ask() -> int:
        if engine.losses < MAX_DEATHS:
            engine.die()
        is_alone.set()
        while not engine.is_closed:
            await asyncio.sleep(0)
        raise EngineUnavailable("the connection to the engine was closed")

    task = asyncio.create_task(answer(ask))
    await is_alone.wait()
    engine.is_closed, engine.status = True, None
    for _ in range(100):
        await asyncio.sleep(0)
    assert not task.done()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
