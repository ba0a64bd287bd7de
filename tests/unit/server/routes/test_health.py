"""When an engine counts as ready, by what it says of itself and by a clock of the test's."""

from __future__ import annotations

import msgspec
import pytest

from engine.client import client as client_module
from engine.client.client import EngineClient
from engine.errors import EngineUnavailable
from engine.messages import Status
from server.routes.health import check_ready

STALL_S = 5.0
IDLE = Status(
    state="ready",
    num_slots=8,
    running=0,
    waiting=0,
    max_waiting=100,
    retry_after_s=1,
    steps=0,
    n_ctx=64,
    vocab_size=32,
    fingerprint="",
)


class Heard:
    """A client at an hour of the test's choosing, and what the engine tells it."""

    def __init__(self) -> None:
        self.now = 1_000.0
        self.client = EngineClient("tcp://127.0.0.1:1")
        self.client._send = lambda message: None  # type: ignore[method-assign]

    def monotonic(self) -> float:
        return self.now

    def hear(self, after_s: float, **fields: object) -> None:
        self.client._ask()
        self.now += after_s
        self.client._receive(msgspec.structs.replace(IDLE, **fields))

    def reason(self) -> str:
        """Why it is not ready; empty if it is."""
        try:
            check_ready(self.client, STALL_S)
        except EngineUnavailable as error:
            return error.message
        return ""


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Heard:
    heard = Heard()
    monkeypatch.setattr(client_module, "time", heard)
    return heard


def test_before_the_first_answer_it_is_not_ready(heard: Heard) -> None:
    assert "does not answer" in heard.reason()


def test_an_idle_engine_that_answers_is_ready_for_ever(heard: Heard) -> None:
    for _ in range(10):
        heard.hear(STALL_S - 1)
        assert heard.reason() == ""


def test_an_engine_that_steps_is_ready_however_long_it_is_full(heard: Heard) -> None:
    for step in range(10):
        heard.hear(STALL_S - 1, steps=step, running=8, waiting=90)
        assert heard.reason() == ""


def test_work_without_a_step_is_a_stall_after_a_while(heard: Heard) -> None:
    heard.hear(1, steps=7, running=8)
    for _ in range(5):
        assert heard.reason() == ""
        heard.hear(1, steps=7, running=8, waiting=3)
    assert heard.reason() == ""
    heard.hear(0.5, steps=7, running=8, waiting=3)
    assert "8 sequences run and 3 wait" in heard.reason()
    assert "no step for 5.5 s, and stall_s = 5" in heard.reason()
    heard.hear(1, steps=8, running=8)
    assert heard.reason() == ""


def test_work_after_a_rest_has_all_its_time(heard: Heard) -> None:
    for _ in range(20):
        heard.hear(1, steps=7)
    for _ in range(5):
        heard.hear(1, steps=7, waiting=1)
        assert heard.reason() == ""
    heard.hear(1.5, steps=7, waiting=1)
    assert "stalled" in heard.reason()
    heard.hear(1, steps=7)  # it was aborted
    assert heard.reason() == ""


def test_silence_is_a_stall_after_a_while_idle_or_not(heard: Heard) -> None:
    for fields in ({}, {"running": 3}):
        heard.hear(1, steps=12, **fields)
        heard.now += 100  # nobody asked: we were stopped ourselves
        assert heard.reason() == ""
        for _ in range(6):
            heard.client._ask()
            assert heard.reason() == ""
            heard.now += 1
        heard.now -= 0.9
        assert "not answered for 5.1 s" in heard.reason()
        assert "the step after number 12" in heard.reason()
        heard.hear(0, steps=13, **fields)
        assert heard.reason() == ""


def test_an_engine_that_drains_is_not_ready(heard: Heard) -> None:
    heard.hear(1, state="draining", running=2)
    assert heard.reason() == "the engine is draining"
