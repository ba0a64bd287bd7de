"""Warnings: reasons not to trust a summary's figures, in plain sentences."""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec
import numpy as np

from srm.loadtest.analysis.measures import is_whole, under_way, within
from srm.loadtest.analysis.window import Window
from srm.loadtest.recording import Recording, Rows, Times
from srm.loadtest.scenario import Scenario
from srm.loadtest.summary import Summary

BUSY = 0.8
"""Share of one core above which a client process may be the bottleneck."""
LATE_S, LATE_SHARE = 0.01, 0.1
"""Lateness, in seconds and as a share of the median TTFT, above which a warning says so."""
LAG_S = 0.1
"""Seconds of event loop lag above which measured times are affected."""
FOR_P999 = 1000
"""The fewest values for which a p99.9 is below the maximum."""
CACHED_SHARE = 0.05
"""Share of the prompt tokens, beside those of shared prefixes, that a server may have cached."""
WINDOW_E2E = 20
"""Median requests that a window should last, so that those across its edges matter little."""
GROWTH_DEVIATIONS, GROWTH_SHARE = 2.5, 0.1
"""Growth of concurrency that is significant: in standard deviations, and as a share of the mean."""


def warnings(summary: Summary, recording: Recording) -> list[str]:
    """Return what a reader must know before believing the summary; empty if nothing."""
    if not summary.planned:
        return ["No request was planned in the window: nothing was measured."]
    return [
        *_harness(summary),
        *_failures(summary, recording.about.reasons),
        *_size(summary, recording),
        *_counts(summary, recording),
        *_cached(summary, recording),
        *_overload(summary, recording),
    ]


def _harness(summary: Summary) -> Iterator[str]:
    if math.isnan(summary.cpu_share):
        yield "The harness did not record its CPU time: whether it was the limit is unknown."
    if summary.cpu_share > BUSY:
        yield (
            f"The busiest client process used {summary.cpu_share:.0%} of a core: the harness may"
            " be the limit, not the server. More `workers` may help."
        )
    late, usual = summary.lateness.p99, summary.ttft.p50
    if late > LATE_S or late > LATE_SHARE * usual:
        beside = "" if math.isnan(usual) else f", the median TTFT {usual * 1e3:.3g} ms"
        yield (
            f"Requests were sent late: the p99 of lateness is {late * 1e3:.3g} ms{beside}."
            " TTFT and E2E count it; `ttft_sent` and `e2e_sent` do not."
        )
    if summary.lag_max_s > LAG_S:
        yield (
            f"An event loop of the harness was late by up to {summary.lag_max_s * 1e3:.0f} ms:"
            " tokens that came meanwhile have too late a time."
        )


def _failures(summary: Summary, reasons: dict[str, str]) -> Iterator[str]:
    cut = summary.errors.get("cut", 0)
    if cut:
        yield (
            f"{cut} of {summary.planned} requests were cut: they were still under way when the"
            " run ended. Percentiles leave out these, the slowest; a longer `grace_s` would not."
        )
    failed = {kind: number for kind, number in summary.errors.items() if kind != "cut"}
    if failed:
        kinds = ", ".join(f"{number} {kind}" for kind, number in failed.items())
        yield (
            f"{sum(failed.values())} of {summary.planned} requests failed ({kinds}): percentiles"
            " of TTFT, TPOT and E2E are of completed ones only. Goodput counts all."
        )
    yield from (f"The first {kind} error: {reasons[kind]}" for kind in failed if kind in reasons)


def _size(summary: Summary, recording: Recording) -> Iterator[str]:
    completed = summary.e2e.count
    if completed < FOR_P999:
        yield (
            f"{completed} requests completed: p99.9 of what is measured once a request is no more"
            f" than the slowest of them. At least {FOR_P999} are needed."
        )
    start, end = summary.window
    whole_run = start <= 0 and end > recording.about.seconds
    if not whole_run and end - start < WINDOW_E2E * summary.e2e.p50:
        yield (
            f"The window of {end - start:.3g} s is {(end - start) / summary.e2e.p50:.1f} times as"
            f" long as the median request: requests across its edges weigh much. {WINDOW_E2E} times"
            " would be better."
        )


def _counts(summary: Summary, recording: Recording) -> Iterator[str]:
    if summary.miscounted:
        yield (
            f"In {summary.miscounted} of {summary.checked} replies the client counts other tokens"
            f" than the server: {summary.counted_output_tokens} against"
            f" {summary.usage_output_tokens} in all."
        )
    requests = recording.requests
    planned = within(requests["planned"], summary.window)
    uncounted = (requests["output_tokens"] < 0) & (requests["usage_output_tokens"] < 0)
    guessed = planned & is_whole(requests) & uncounted
    if guessed.any():
        yield (
            f"Tokens of {int(guessed.sum())} replies were counted by neither client nor server:"
            " each event counts as one token."
        )
    yield from _short(requests[planned & is_whole(requests)], recording.about.scenario)
    if summary.completed and not summary.ttft.count and recording.about.scenario.stream:
        yield "No reply brought a token: there is no TTFT, no ITL and no TPOT."


def _short(rows: Rows, scenario: Scenario) -> Iterator[str]:
    if not msgspec.json.decode(scenario.extra_body).get("ignore_eos", scenario.ignore_eos):
        return
    tokens = np.maximum(rows["output_tokens"], rows["usage_output_tokens"])
    asked = rows["n"].astype(np.int64) * rows["max_tokens"]
    short = (tokens >= 0) & (tokens < asked)
    if short.any():
        yield (
            f"{int(short.sum())} of {len(rows)} replies were shorter than asked for, in spite of"
            f" `ignore_eos`: {tokens[short].sum()} of {asked[short].sum()} tokens. A server that"
            " ends replies early does less work than one that does not."
        )


def _cached(summary: Summary, recording: Recording) -> Iterator[str]:
    requests, scenario = recording.requests, recording.about.scenario
    known = (requests["usage_cached_tokens"] >= 0) & (requests["usage_prompt_tokens"] > 0)
    rows = requests[known & within(requests["planned"], summary.window)]
    cached, prompt = rows["usage_cached_tokens"].sum(), rows["usage_prompt_tokens"].sum()
    shared = scenario.prefix_share * scenario.prefix_tokens * len(rows)
    if cached - shared > CACHED_SHARE * prompt:
        yield (
            f"The server had {cached / prompt:.0%} of the prompt tokens in its prefix cache: it was"
            " quicker than with prompts that it does not know. Another `seed`, or more `prompts`,"
            " send other ones, unless this is what you measure."
        )


def _overload(summary: Summary, recording: Recording) -> Iterator[str]:
    if recording.about.scenario.arrivals not in {"constant", "poisson"}:
        return  # bounded in closed loops; in ramps and traces the load itself may grow
    requests = recording.requests
    grown, mean = growth(requests["planned"], requests["ended"], summary.window)
    if grown > max(GROWTH_DEVIATIONS * math.sqrt(2 * mean), GROWTH_SHARE * mean):
        yield (
            f"Requests under way grew by {grown:.0f} in the second half of the window, around a"
            f" mean of {mean:.0f}: the server does not keep up with this rate, and times depend on"
            " how long the run is."
        )


def growth(planned: Times, ended: Times, window: Window) -> tuple[float, float]:
    """Return how much requests under way grew in the window's second half, and their mean.

    Counts requests from their planned times and fits a line by least squares through 100 moments.
    Where the load is steady and requests do not hinder each other, the difference of two moments
    has a variance of at most twice the mean.
    """
    moments = np.linspace((window[0] + window[1]) / 2, window[1], 100)
    counts = under_way(np.sort(planned), np.sort(ended), moments)
    slope = np.polyfit(moments - moments[0], counts, 1)[0]
    return float(slope * (moments[-1] - moments[0])), float(counts.mean())
