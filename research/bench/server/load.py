"""Loads a server by the client processes of `srm loadtest`, for benchmarks of ours."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from srm.errors import ConfigError
from srm.loadtest.analysis.measures import is_whole
from srm.loadtest.client.workers import run
from srm.loadtest.recording import ERRORS, Recording
from srm.loadtest.scenario import Scenario


def send(url: str, timeout_s: float = 3600.0, **fields: Any) -> Recording:
    """Send `requests` of a scenario with these fields, whatever time they take.

    Raises ConfigError unless all are answered, and TimeoutError after `timeout_s`.
    """
    times: dict[str, Any] = {"duration_s": 0.0, "timeout_s": timeout_s, "grace_s": timeout_s}
    scenario = Scenario(url=url, metrics_url="none", **times, **fields)

    async def until_over() -> Recording:
        async with asyncio.timeout(timeout_s):
            return await run(scenario, lambda _: None, "bench")

    requests = (recording := asyncio.run(until_over())).requests
    failed = requests[~is_whole(requests)]
    if len(failed) or len(requests) < scenario.requests:
        counts = dict(zip(*np.unique(failed["error"], return_counts=True), strict=True))
        errors = {ERRORS[error]: int(count) for error, count in counts.items()}
        done = len(requests) - len(failed)
        raise ConfigError(f"{url}: {done} of {scenario.requests} requests: {errors}")
    return recording
