"""One run of `srm loadtest`, its client processes and all, and what it recorded; no reports."""

from __future__ import annotations

import asyncio
import time
from typing import Any, NamedTuple

from loadtest.recording import Recording
from loadtest.run import run
from loadtest.scenario import Scenario
from loadtest.summarize import summarize
from loadtest.summary import Summary


class Loaded(NamedTuple):
    """A run that is over."""

    recording: Recording
    summary: Summary

    def monotonic(self, seconds: float) -> float:
        """A time of the run's clock on the machine's, which the toys write down."""
        return self.recording.about.started_unix + seconds - (time.time() - time.monotonic())


def loaded(url: str, **settings: Any) -> Loaded:
    """loaded(toy.url, arrivals="constant", rate=100): settings as in Scenario."""
    scenario = Scenario(url=url, **settings)
    recording = asyncio.run(run(scenario, lambda _progress: None, "a test"))
    return Loaded(recording, summarize(recording))
