"""Timelines: a recording and the server's /metrics, aggregated in intervals.

There are at most INTERVALS of them, however long the run, so that plots stay small.
"""

from __future__ import annotations

import math
from itertools import pairwise

import msgspec
import numpy as np

from srm.loadtest.analysis.observed import Observed
from srm.loadtest.quantities import NAN
from srm.loadtest.recording import Counts, MetricSample, Rows, Times

INTERVALS = 300
SERVER_NAMES = {
    "running": ("srm_engine_running_sequences", "vllm:num_requests_running"),
    "waiting": ("srm_engine_waiting_sequences", "vllm:num_requests_waiting"),
    "output_tokens": ("srm_engine_decode_tokens_total", "vllm:generation_tokens_total"),
    "prompt_tokens": ("srm_engine_prompt_tokens_total", "vllm:prompt_tokens_total"),
}
"""Metrics of servers that are drawn: ours, then vLLM's; the first that exists is taken."""


class Timeline(msgspec.Struct, frozen=True):
    """Columns with one value per interval, as the client saw it. NaN where nothing happened."""

    width_s: float
    start_s: list[float]
    output_tokens_per_s: list[float]
    completed_per_s: list[float]
    errors_per_s: list[float]
    in_flight: list[float]
    """Requests sent and not ended, mean over the interval."""
    ttft_p50: list[float]
    """The median over the requests planned in the interval."""
    ttft_p99: list[float]
    lateness_max: list[float]
    """The largest lateness of the requests planned in the interval."""
    cpu_share: list[float]
    """Share of one core used by the busiest client process."""
    lag_max: list[float]
    """The largest lag of an event loop of the harness."""


class ServerTimeline(msgspec.Struct, frozen=True):
    """Columns with one value per sample of /metrics, at most INTERVALS. Empty without samples."""

    names: dict[str, str]
    """The server's metric behind each column; columns without a metric are empty."""
    time_s: list[float]
    running: list[float]
    waiting: list[float]
    output_tokens_per_s: list[float]
    """Increase of the counter since the previous sample, per second."""
    prompt_tokens_per_s: list[float]


def timeline(observed: Observed) -> Timeline:
    """Aggregate over intervals of a second, or of more whole seconds if the run is long."""
    recording = observed.recording
    seconds = max(recording.about.seconds, 1e-9)
    width = float(max(1, math.ceil(seconds / INTERVALS)))
    count = max(1, math.ceil(seconds / width))
    requests, clients, parts = recording.requests, recording.clients, observed.chunks

    def place(times: Times) -> Counts:
        return np.clip(times // width, 0, count - 1).astype(np.int64)

    def rate(times: Times, weights: Times | None = None) -> list[float]:
        summed = np.bincount(place(times), weights=weights, minlength=count)
        spans = np.full(count, width)
        spans[-1] = seconds - width * (count - 1)
        return list((summed / np.maximum(spans, width / 10)).tolist())

    ended = requests[~np.isnan(requests["ended"])]
    failed = ended["error"] != 0
    planned = place(requests["planned"])
    begun = requests[~np.isnan(observed.first)]
    ttft = (observed.first - requests["planned"])[~np.isnan(observed.first)]
    first = place(begun["planned"])
    return Timeline(
        width_s=width,
        start_s=[width * index for index in range(count)],
        output_tokens_per_s=rate(parts.time, parts.tokens * parts.scale),
        completed_per_s=rate(ended["ended"][~failed]),
        errors_per_s=rate(ended["ended"][failed]),
        in_flight=_in_flight(requests, seconds, width, count),
        ttft_p50=_percentile(first, ttft, 50, count),
        ttft_p99=_percentile(first, ttft, 99, count),
        lateness_max=_largest(planned, requests["sent"] - requests["planned"], count),
        cpu_share=_largest(place(clients["time"]), _cpu_shares(clients), count),
        lag_max=_largest(place(clients["time"]), clients["lag_s"], count),
    )


def _in_flight(requests: Rows, seconds: float, width: float, count: int) -> list[float]:
    """Return means per interval, by ∫₀ᵗ under way = Σ max(0, t - sent) - max(0, t - ended)."""
    sent = requests[~np.isnan(requests["sent"])]
    edges = np.minimum(width * np.arange(count + 1), seconds)

    def area(times: Times) -> Times:
        ordered = np.sort(np.nan_to_num(times, nan=seconds))
        before = np.searchsorted(ordered, edges)
        sums = np.concatenate([[0.0], np.cumsum(ordered)])
        integral: Times = edges * before - sums[before]
        return integral

    under_way = np.diff(area(sent["sent"]) - area(sent["ended"]))
    return list((np.maximum(under_way, 0) / np.maximum(np.diff(edges), 1e-12)).tolist())


def _percentile(places: Counts, values: Times, q: float, count: int) -> list[float]:
    order = np.argsort(places, kind="stable")
    bounds = np.searchsorted(places[order], np.arange(count + 1))
    ordered = values[order]
    return [
        float(np.percentile(ordered[low:high], q)) if high > low else NAN
        for low, high in pairwise(bounds)
    ]


def _largest(places: Counts, values: Times, count: int) -> list[float]:
    largest = np.full(count, -np.inf)
    known = ~np.isnan(values)
    np.maximum.at(largest, places[known], values[known])
    return list(np.where(np.isfinite(largest), largest, NAN).tolist())


def _cpu_shares(clients: Rows) -> Times:
    """[rows] CPU time of each row, divided by the time since that process's previous row."""
    shares = np.full(len(clients), NAN)
    for worker in np.unique(clients["worker"]):
        rows = np.flatnonzero(clients["worker"] == worker)
        spans = np.diff(clients["time"][rows], prepend=0.0)
        shares[rows] = clients["cpu_s"][rows] / np.where(spans > 0, spans, NAN)
    return shares


def server_timeline(samples: list[MetricSample]) -> ServerTimeline:
    """Return the server's metrics; a falling counter, as after a restart, leaves a gap."""
    samples = sorted(samples, key=lambda sample: sample.time)
    step = max(1, math.ceil(len(samples) / INTERVALS))
    samples = samples[::step]
    names = {
        column: column_name
        for column, candidates in SERVER_NAMES.items()
        for column_name in [
            next((n for n in candidates if any(n in s.values for s in samples)), "")
        ]
        if column_name
    }
    times = [sample.time for sample in samples]

    def gauge(column: str) -> list[float]:
        return [s.values.get(names[column], NAN) for s in samples] if column in names else []

    def counted(column: str) -> list[float]:
        values, counts = gauge(column), [NAN] if column in names and samples else []
        for index in range(1, len(values)):
            grown, took = values[index] - values[index - 1], times[index] - times[index - 1]
            counts.append(grown / took if grown >= 0 and took > 0 else NAN)
        return counts

    return ServerTimeline(
        names=names,
        time_s=times if names else [],
        running=gauge("running"),
        waiting=gauge("waiting"),
        output_tokens_per_s=counted("output_tokens"),
        prompt_tokens_per_s=counted("prompt_tokens"),
    )
