"""One run of `srm loadtest` and what it recorded: of real processes, or in virtual time."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec
import numpy as np

from srm.loadtest.analysis.summarize import summarize
from srm.loadtest.client import frames
from srm.loadtest.client.target import Target
from srm.loadtest.client.worker import WorkerPart, pace_of
from srm.loadtest.client.workers import num_workers, put_together, run
from srm.loadtest.recording import Recording, Times
from srm.loadtest.scenario import Scenario
from srm.loadtest.summary import Summary
from srm.loadtest.workload.workload import Workload


class Loaded(NamedTuple):
    """A run that is over."""

    recording: Recording
    summary: Summary
    started: float
    """The run's second 0 on the monotonic clock, by which toys write down what they did."""

    @property
    def first(self) -> Times:
        """[requests] When the first token of each came; inf without one."""
        result = np.full(len(self.recording.requests), np.inf)
        np.minimum.at(result, self.recording.events["request"], self.recording.events["time"])
        return result


def loaded(url: str, **settings: Any) -> Loaded:
    """loaded(toy.url, arrivals="constant", rate=100): settings as in Scenario."""
    scenario = Scenario(url=url, **settings)
    recording = asyncio.run(run(scenario, lambda _progress: None, "a test"))
    started = recording.about.started_unix - (time.time() - time.monotonic())
    return Loaded(recording, summarize(recording), started)


async def simulated(url: str, **settings: Any) -> Loaded:
    """The same in a VirtualLoop."""
    recording, started = await simulate(Scenario(**settings), url)
    return Loaded(recording, summarize(recording), started)


async def simulate(scenario: Scenario, url: str) -> tuple[Recording, float]:
    """Every client process's part of a run against that url, in this process and a VirtualLoop."""
    scenario = msgspec.structs.replace(scenario, url=url, served_model_name="toy")
    address = urlsplit(url)
    assert address.hostname is not None and address.port is not None
    head = b"POST /v1/completions HTTP/1.1\r\nhost: toy\r\ncontent-length: "
    target = Target(address.hostname, address.port, "", head, "toy", "")
    started, workers = time.monotonic(), num_workers(scenario)
    setups = [frames.Setup(scenario, target, number, workers) for number in range(workers)]
    work = Workload(scenario)
    with Path(os.devnull).open("wb") as nowhere:
        parts = [
            WorkerPart(setup, work, pace_of(setup, work), started, nowhere.fileno())
            for setup in setups
        ]
        results = await asyncio.gather(*(part.result() for part in parts))
    return put_together(results, scenario, target, "a test", 0.0, False), started
