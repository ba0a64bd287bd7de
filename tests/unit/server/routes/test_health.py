"""When an engine counts as ready, by what it says of itself and by a clock of the test's."""

from __future__ import annotations

import re

import msgspec
import pytest

from srm import metrics_memory
from srm.engine.client import client as client_module
from srm.engine.client import connection
from srm.engine.client.client import EngineClient
from srm.errors import EngineUnavailable
from srm.metrics_memory import JoinedRegion
from srm.server.routes.health import check_ready, why_not_ready
from tests.kit.engines.making import IDLE

STALL_S = 5.0


class Heard:
    """A client at an hour of the test's choosing, and what the engine tells it."""

    def __init__(self) -> None:
        self.now = 1_000.0
        self.client = EngineClient("tcp://127.0.0.1:1")
        (self.engine,) = self.client.engines
        self.engine.send = lambda message: None  # type: ignore[method-assign]

    def monotonic(self) -> float:
        return self.now

    time = monotonic

    def report(self, after_s: float, **fields: object) -> str:
        """Why it is not ready once this is said; empty if it is."""
        self.engine.greet()
        self.now += after_s
        self.engine.receive(msgspec.structs.replace(IDLE, **fields))
        return self.reason()

    def reason(self) -> str:
        try:
            check_ready(self.client, STALL_S)
        except EngineUnavailable as error:
            return error.message
        return ""


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Heard:
    heard = Heard()
    monkeypatch.setattr(connection, "time", heard)
    return heard


def test_not_ready_before_an_answer_and_while_it_drains(heard: Heard) -> None:
    assert "it is starting" in heard.reason()
    assert heard.report(1, state="draining", running=2) == "the engine is draining"


def test_a_start_says_what_it_does(heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    """A first compile of minutes was an engine that does not answer, to /ready and completions."""
    region = metrics_memory.create([""])[0]
    monkeypatch.setattr(metrics_memory, "_regions", [region])
    engine = JoinedRegion(region)
    since, compiling = (
        engine.new_value("gauge", name, name, (), (), "", multiprocess_mode="livemostrecent")
        for name in (metrics_memory.STARTING_SINCE, metrics_memory.COMPILING)
    )
    since.set(heard.now - 3)
    assert heard.reason() == "the engine is starting: loading, 3 s so far"
    heard.now += 90
    compiling.set(1, heard.now)
    heard.now += 12
    reason = (
        "the engine is starting: compiling the graph (once per model and machine, usually 30 to "
        "240 s), 12 s so far"
    )
    assert heard.reason() == reason
    with pytest.raises(EngineUnavailable, match=re.escape(reason)):
        heard.client.open([])
    region.forget_gauges()
    assert "compiling" not in heard.reason(), "it died while it compiled"
    JoinedRegion(region).new_value(
        *("gauge", metrics_memory.STARTING_SINCE, metrics_memory.STARTING_SINCE, (), (), ""),
        multiprocess_mode="livemostrecent",
    ).set(heard.now)
    assert heard.reason() == "the engine is starting: loading, 0 s so far"
    assert not heard.report(1), "it serves"
    since.set(0)
    heard.engine.give_up("it is gone")
    assert "frozen or gone" in heard.reason()


@pytest.mark.parametrize("is_full", [False, True])
def test_an_engine_that_idles_or_steps_is_ready_for_ever(heard: Heard, is_full: bool) -> None:
    for step in range(10):
        fields = {"steps": step, "running": 8, "waiting": 90} if is_full else {}
        assert not heard.report(STALL_S - 1, **fields)


def test_work_without_a_step_is_a_stall_after_a_while(heard: Heard) -> None:
    heard.report(1, steps=7, running=8)
    for _ in range(5):
        assert not heard.report(1, steps=7, running=8, waiting=3)
    reason = heard.report(0.5, steps=7, running=8, waiting=3)
    assert "8 sequences run and 3 wait" in reason
    assert "no step for 5.5 s, and stall_s = 5" in reason
    assert not heard.report(1, steps=8, running=8)


def test_work_after_a_rest_has_all_its_time(heard: Heard) -> None:
    for _ in range(20):
        heard.report(1, steps=7)
    for _ in range(5):
        assert not heard.report(1, steps=7, waiting=1)
    assert "stalled" in heard.report(1.5, steps=7, waiting=1)
    assert not heard.report(1, steps=7), "it was aborted"


@pytest.mark.parametrize("fields", [{}, {"running": 3}])
def test_silence_is_a_stall_after_a_while(heard: Heard, fields: dict[str, int]) -> None:
    heard.report(1, steps=12, **fields)
    heard.now += 100
    assert not heard.reason(), "nobody asked: we were stopped ourselves"
    for _ in range(6):
        heard.engine.greet()
        assert not heard.reason()
        heard.now += 1
    heard.now -= 0.9
    assert "not answered for 5.1 s" in heard.reason()
    assert "the step after number 12" in heard.reason()
    assert not heard.report(0, steps=13, **fields)


def test_one_engine_of_two_that_is_away_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "ENGINE_TIMEOUT_S", 0.0)
    client = EngineClient("tcp://127.0.0.1:1,tcp://127.0.0.1:2")
    client.engines[1].receive(IDLE)
    health = check_ready(client, STALL_S)
    assert health.summary == "1 of 2 engines"
    assert isinstance(health.engines, list) and health.engines[1] == "ready"
    away, ready = why_not_ready(client, STALL_S)
    assert "it is starting" in away and not ready
    client.engines[0].losses = 1
    assert "gone" in why_not_ready(client, STALL_S)[0]
