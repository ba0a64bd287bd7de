from __future__ import annotations

import asyncio
import time

import numpy as np

from srm.loadtest.client.pacing import Alarm, ClosedLoop, OpenLoop
from srm.loadtest.scenario import Scenario
from srm.loadtest.workload.workload import RequestPlan, Workload

WORKLOAD = Workload(Scenario(prompt_tokens="2", output_tokens="2"))


class Sent:
    """What a loop has begun, and when it said that it was the last."""

    def __init__(self, loop: OpenLoop | ClosedLoop) -> None:
        """Starts the loop."""
        self.planned: dict[int, float] = {}
        self.over = asyncio.Event()
        self.until = 0.0
        self.started = time.monotonic()
        loop.start(self.started, self.send, self.finished)

    def send(self, index: int, planned: float, asked: RequestPlan) -> None:
        assert index not in self.planned
        assert planned <= time.monotonic() - self.started
        self.planned[index] = planned

    def finished(self, until: float) -> None:
        assert not self.over.is_set(), "told once"
        self.until = until
        self.over.set()


async def test_an_alarm_never_rings_early_and_rings_once() -> None:
    rung: list[float] = []
    alarm = Alarm(lambda: rung.append(time.monotonic()))
    for wait in (0.0, -5.0, 0.0003, 0.004):
        at = time.monotonic() + wait
        alarm.set(at)
        while not rung:
            await asyncio.sleep(0.001)
        assert rung.pop() >= at
    alarm.set(time.monotonic() + 60)
    alarm.set(time.monotonic())
    await asyncio.sleep(0.02)
    assert len(rung) == 1
    alarm.close()


async def test_an_open_loop_without_requests_of_its_own_is_over_at_once() -> None:
    sent = Sent(OpenLoop(np.array([0.5]), slice(1, None, 2), WORKLOAD))
    assert sent.over.is_set()
    assert sent.until == 0.5


async def test_an_open_loop_that_is_stopped_sends_no_more() -> None:
    loop = OpenLoop(np.array([0.0, 3600.0]), slice(0, None), WORKLOAD)
    sent = Sent(loop)
    await asyncio.sleep(0.01)
    loop.stop()
    loop.stop()
    assert list(sent.planned) == [0] and loop.planned(1.0) == 1


async def test_a_closed_loop_begins_none_after_its_duration() -> None:
    loop = ClosedLoop(2, iter(range(10**9)), WORKLOAD, 0.02)
    sent = Sent(loop)
    await sent.over.wait()
    loop.ended("none")
    assert len(sent.planned) == 2


async def test_a_closed_loop_pauses_where_nothing_listens() -> None:
    loop = ClosedLoop(1, iter(range(10**9)), WORKLOAD, 0.0)
    sent = Sent(loop)
    loop.ended("connect")
    assert len(sent.planned) == 1
    while len(sent.planned) < 2:
        await asyncio.sleep(0.01)
    loop.stop()
