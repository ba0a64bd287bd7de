"""An engine of a command's own: how often it is started again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import pytest

from server.supervise import embedded_engine
from server.supervise.embedded_engine import MAX_CRASHES
from server.supervise.supervisor import Child


class Crashing:
    """Ends with these codes, one after the other."""

    def __init__(self, codes: list[int], then: Callable[[], None] = lambda: None) -> None:
        self.codes = codes
        self.then = then

    async def run_once(self) -> int:
        self.then()
        return self.codes.pop(0)


async def keep(
    child: Crashing, progress: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> list[float]:
    """The pauses that are made, until it is given up; with the code it is given up with."""
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    code = await embedded_engine._keep(cast(Child, child), progress)
    return [*pauses, code]


async def test_crashes_with_nothing_done_between_them_end_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    child = Crashing([-9] * 100)
    *pauses, code = await keep(child, lambda: 7, monkeypatch)
    assert (len(pauses), code, len(child.codes)) == (MAX_CRASHES - 1, -9, 100 - MAX_CRASHES)
    assert pauses == sorted(pauses) and pauses[-1] == 5


@pytest.mark.parametrize(("code", "said"), [(-9, True), (1, True), (2, False), (3, False)])
def test_what_the_engine_has_said_of_its_end_is_the_last_line(code: int, said: bool) -> None:
    """Behind "num_slots = … does not fit" came "the engine process ended, exit code 2"."""
    assert bool(embedded_engine._ended(code).message) == said


async def test_crashes_with_something_done_between_them_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done = 0

    def work() -> None:
        nonlocal done
        done += 1

    child = Crashing([-9] * 50 + [3], work)
    *pauses, code = await keep(child, lambda: done, monkeypatch)
    assert (len(pauses), code) == (50, 3), "a checkpoint that is none is so the next time, too"
    assert max(pauses) < 1
