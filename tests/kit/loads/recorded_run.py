"""Recordings of runs that never were: a server of so many slots, each making tokens at one pace."""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np

from srm.loadtest.analysis.summarize import summarize
from srm.loadtest.recording import MetricSample, Recording
from srm.loadtest.report.report_files import MeasuredRun
from tests.kit.loads.recorded import recording, request

NAMES = (
    *("srm_engine_running_sequences", "srm_engine_waiting_sequences"),
    *("srm_engine_decode_tokens_total", "srm_engine_prompt_tokens_total"),
)


def recorded(
    rate: float = 20.0,
    seconds: float = 30.0,
    slots: int = 32,
    token_s: float = 0.02,
    failing: float = 0.0,
    seed: int = 0,
    versions: dict[str, str] | None = None,
    machine: str = "a machine of 2 cores",
    **settings: Any,
) -> Recording:
    """An open loop against a queue; `failing`: the share of requests that are refused."""
    random = np.random.default_rng(seed)
    planned = np.sort(random.uniform(0, seconds, int(rate * seconds)))
    all_sent = planned + random.exponential(0.0005, len(planned))
    known = {name: 32 for name in ("output_tokens", "usage_output_tokens", "usage_prompt_tokens")}
    free, requests, events = [0.0] * slots, [], []
    for index, (due, sent) in enumerate(zip(planned.tolist(), all_sent.tolist(), strict=True)):
        fields: dict[str, Any] = {"sent": sent, "prompt_tokens": 32, "max_tokens": 32}
        if random.random() < failing:
            fields |= {"error": "rejected", "status": 503}
            requests.append(request(index, due, sent + 0.002, **fields))
            continue
        begin = max(heapq.heappop(free), sent) + 0.005
        times = (begin + np.cumsum(random.gamma(20, token_s / 20, 32))).tolist()
        heapq.heappush(free, times[-1])
        events += [(index, 0, time, 1) for time in times]
        fields |= {"first_byte": times[0], "num_bytes": 5000, "queue_s": begin - sent}
        requests.append(request(index, due, times[-1] + 0.001, **fields, **known))
    end = max([seconds, *(row["ended"] for row in requests)])
    cpu_s, lag_s = random.uniform(0.2, 0.4, int(end)), random.exponential(0.001, int(end))
    clients = [(0, at + 1.0, cpu_s[at], lag_s[at], 0) for at in range(int(end))]
    settings = {"warmup_s": 0.1 * seconds, "output_tokens": "32", **settings}
    load: dict[str, Any] = {"arrivals": "poisson", "rate": rate, "duration_s": seconds}
    result = recording(requests, events, clients, end, **(load | settings))
    about = result.about
    about.command, about.started_unix = f"srm loadtest run --rate {rate:g}", 1_790_000_000.0
    about.machine, about.versions = machine, versions or {"srm": "0.1.0", "Python": "3.11"}
    about.server_metrics = [_sample(time, result, slots) for time in range(int(end) + 1)]
    return result


def _sample(time: float, result: Recording, slots: int) -> MetricSample:
    requests = result.requests
    there = int(((requests["sent"] <= time) & (requests["ended"] > time)).sum())
    numbers = (
        float(min(there, slots)),
        float(max(there - slots, 0)),
        float(np.searchsorted(result.events["time"], time)),
        32.0 * int((requests["sent"] <= time).sum()),
    )
    return MetricSample(float(time), dict(zip(NAMES, numbers, strict=True)))


def run_of(*warnings: str, name: str | None = None, **settings: Any) -> MeasuredRun:
    """A run as `srm loadtest run` has it in the end."""
    recording = recorded(**settings)
    return MeasuredRun(summarize(recording, name), recording, warnings)
