"""Recordings of runs that never were: a server of so many slots, each making tokens at one pace."""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np

from loadtest.analysis.summarize import summarize
from loadtest.recording import CLIENT, ERRORS, EVENT, REQUEST, About, MetricSample, Recording
from loadtest.report.report_files import Run
from loadtest.scenario import Scenario

SAMPLED = ("srm_engine_running_sequences", "srm_engine_waiting_sequences")
COUNTED = ("srm_engine_decode_tokens_total", "srm_engine_prompt_tokens_total")


def recorded(
    rate: float = 20.0,
    seconds: float = 30.0,
    slots: int = 32,
    token_s: float = 0.02,
    failing: float = 0.0,
    seed: int = 0,
    names: tuple[str, ...] = (*SAMPLED, *COUNTED),
    versions: dict[str, str] | None = None,
    machine: str = "a machine of 2 cores",
    **settings: Any,
) -> Recording:
    """An open loop against a queue; `failing`: the share of requests that are refused."""
    wanted: dict[str, Any] = {"arrivals": "poisson", "rate": rate, "duration_s": seconds}
    scenario = Scenario(**{**wanted, "warmup_s": 0.1 * seconds, "output_tokens": "32", **settings})
    random = np.random.default_rng(seed)
    planned = np.sort(random.uniform(0, seconds, int(rate * seconds)))
    requests = np.zeros(len(planned), REQUEST)
    requests["index"] = np.arange(len(planned))
    requests["planned"] = planned
    requests["sent"] = planned + random.exponential(0.0005, len(planned))
    requests["n"], requests["prompt_tokens"], requests["max_tokens"] = 1, 32, 32
    requests["queue_s"], requests["first_byte"] = np.nan, np.nan
    for name in ("output_tokens", "usage_output_tokens", "usage_prompt_tokens"):
        requests[name] = -1
    free = [0.0] * slots
    events: list[tuple[int, int, float, int]] = []
    for row in requests:
        if random.random() < failing:
            row["error"], row["status"] = ERRORS.index("rejected"), 503
            row["ended"] = row["sent"] + 0.002
            continue
        begin = max(heapq.heappop(free), float(row["sent"])) + 0.005
        times = begin + np.cumsum(random.gamma(20, token_s / 20, 32))
        heapq.heappush(free, float(times[-1]))
        events += [(int(row["index"]), 0, float(time), 1) for time in times]
        row["first_byte"], row["ended"] = times[0], times[-1] + 0.001
        row["status"], row["num_bytes"] = 200, 5000
        row["queue_s"] = begin - row["sent"]
        row["output_tokens"] = row["usage_output_tokens"] = 32
        row["usage_prompt_tokens"] = 32
    end = float(np.nanmax(requests["ended"], initial=seconds))
    received = np.sort(np.array([event[2] for event in events]))
    about = About(
        scenario=scenario,
        command=f"srm loadtest run --rate {rate:g}",
        started_unix=1_790_000_000.0,
        seconds=end,
        stopped_by="duration",
        machine=machine,
        versions={"srm": "0.1.0", "Python": "3.11"} if versions is None else versions,
        server_metrics=[_sample(t, requests, received, slots, names) for t in range(int(end) + 1)],
    )
    clients = np.zeros(int(end), CLIENT)
    clients["time"] = np.arange(1, len(clients) + 1)
    clients["cpu_s"] = random.uniform(0.2, 0.4, len(clients))
    clients["lag_s"] = random.exponential(0.001, len(clients))
    made = np.array(events, EVENT)
    return Recording(about, requests, made[np.argsort(made["time"], kind="stable")], clients)


def _sample(
    time: float, requests: np.ndarray, received: np.ndarray, slots: int, names: tuple[str, ...]
) -> MetricSample:
    there = int(((requests["sent"] <= time) & (requests["ended"] > time)).sum())
    numbers = (
        float(min(there, slots)),
        float(max(there - slots, 0)),
        float(np.searchsorted(received, time)),
        32.0 * int((requests["sent"] <= time).sum()),
    )
    return MetricSample(float(time), dict(zip(names, numbers, strict=True)))


def run_of(*warnings: str, name: str | None = None, **settings: Any) -> Run:
    """A run as `srm loadtest run` has it in the end."""
    recording = recorded(**settings)
    return Run(summarize(recording, name), recording, warnings)
