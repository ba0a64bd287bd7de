"""An engine of a command's own: how often it is started again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count
from typing import cast

import pytest

from server.supervise import embedded_engine
from server.supervise.embedded_engine import MAX_CRASHES
from server.supervise.supervisor import Child


async def keep(
    codes: list[int], progress: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[float], int]:
    """The pauses made for an engine that ends with these codes, and the code it is left with."""
    pauses: list[float] = []

    class Crashing:
        async def run_once(self) -> int:
            return codes.pop(0)

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    code = await embedded_engine._keep(cast(Child, Crashing()), progress)
    return pauses, code


async def test_crashes_with_nothing_done_between_them_end_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    codes = [-9] * 100
    pauses, code = await keep(codes, lambda: 7, monkeypatch)
    assert (len(pauses), code, len(codes)) == (MAX_CRASHES - 1, -9, 100 - MAX_CRASHES)
    assert pauses == sorted(pauses) and pauses[-1] == 5
    pauses, code = await keep([-9] * 50 + [3], count().__next__, monkeypatch)
    assert (len(pauses), code) == (50, 3), "a checkpoint that is none is so the next time, too"
    assert max(pauses) < 1


def test_what_the_engine_has_said_of_its_end_is_the_last_line() -> None:
    """Behind "num_slots = … does not fit" came "the engine process ended, exit code 2"."""
    for code, is_said in ((-9, True), (1, True), (2, False), (3, False)):
        error = embedded_engine._ended(code)
        assert (bool(error.message), error.exit_code) == (is_said, max(code, 1))
