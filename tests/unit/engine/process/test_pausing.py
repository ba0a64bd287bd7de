"""A pause is of all engines that share its memory, those that are started again included."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from srm.engine.messages import Pause, Resume
from srm.engine.process.pausing import Pausing


@pytest.fixture
def memory() -> Iterator[int]:
    fd = os.memfd_create("pause")
    yield fd
    os.close(fd)


def test_engines_are_paused_and_resumed_together(memory: int) -> None:
    one, other = Pausing(memory), Pausing(memory)
    alone = Pausing()
    one.receive(Pause("a", 1_000))
    again = Pausing(memory)
    assert one.is_paused and other.is_paused and again.is_paused and not alone.is_paused
    assert other.has_changed() and not other.has_changed()
    assert 0 <= other.receive(Pause("b", 1_000)).detail["paused_s"] < 1_000  # type: ignore[operator]  # a number
    again.receive(Resume("c"))
    assert not one.is_paused and other.has_changed() and not other.has_changed()
    assert one.receive(Resume("d")).detail == {"paused_s": 0}


def test_the_lease_outlives_an_engine(
    memory: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 1_000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    Pausing(memory).receive(Pause("a", 60))
    one, other = Pausing(memory), Pausing(memory)
    now += 50
    assert one.has_changed() and one.is_paused
    other.renew()
    now += 59
    assert not one.has_changed() and one.is_paused, "renewed by another engine"
    now += 1
    assert one.has_changed() and not one.is_paused
    assert not other.has_changed() and not other.is_paused, "it never was, for what this one saw"
    assert caplog.text.count("paused 110 s ago: it goes on by itself") == 1
