"""Computes the summary of a recording: which window is measured, and every measure in it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from srm.loadtest.analysis import measures
from srm.loadtest.analysis.observed import Observed, observe
from srm.loadtest.analysis.window import Window, checked_window, default_window, load_name
from srm.loadtest.histogram import Histogram
from srm.loadtest.quantities import DISTRIBUTIONS
from srm.loadtest.recording import ERRORS, Flags, Recording, Rows, Times
from srm.loadtest.summary import Summary


def summarize(
    recording: Recording, name: str | None = None, window: Window | None = None
) -> Summary:
    """Compute every measure of a run, or of a part of it.

    By default its name in reports is its load, such as `poisson 40/s`, and its window, [start, end)
    in seconds since the start, is that of `default_window`. Raises ConfigError if nothing is left
    to measure, the recording is broken, or an objective is invalid or cannot be judged.
    """
    scenario = recording.about.scenario
    window = default_window(recording) if window is None else checked_window(window)
    requests = recording.requests
    observed = observe(recording, window)
    planned = measures.within(requests["planned"], window)
    completed = planned & measures.is_whole(requests)
    num_planned = int(planned.sum())

    errors = np.bincount(requests["error"][planned], minlength=len(ERRORS))
    good = completed & measures.good_requests(recording, observed.chunks, scenario.objectives)
    mean, most = measures.concurrency(requests["sent"], requests["ended"], window)
    cpu_share, lag_max_s = measures.client_load(recording.clients, window)

    def share(flags: Flags) -> float:
        return int(flags.sum()) / num_planned if num_planned else math.nan

    wanted, by_name = bool(scenario.objectives), histograms(observed).items()
    distributions: dict[str, Any] = {name: values.distribution() for name, values in by_name}
    return Summary(
        name=load_name(scenario) if name is None else name,
        window=window,
        planned=num_planned,
        completed=int(completed.sum()),
        errors={ERRORS[kind]: int(errors[kind]) for kind in np.flatnonzero(errors) if kind},
        retried=int((planned & (requests["retries"] > 0)).sum()),
        rejected_share=share(planned & (requests["error"] == ERRORS.index("rejected"))),
        **_rates(observed),
        good_per_s=int(good.sum()) / (window[1] - window[0]) if wanted else math.nan,
        good_share=share(good) if wanted else math.nan,
        concurrency=mean,
        concurrency_max=most,
        **distributions,
        **_counts(requests[planned]),
        cpu_share=cpu_share,
        lag_max_s=lag_max_s,
        objectives=scenario.objectives,
    )


def _rates(observed: Observed) -> dict[str, Any]:
    """Return what was planned, ended, received and begun in a second of the window."""
    requests, parts = observed.recording.requests, observed.chunks

    def are_within(times: Times) -> Flags:
        return measures.within(times, observed.window)

    whole = are_within(requests["ended"]) & measures.is_whole(requests)
    sums = {
        "planned_per_s": are_within(requests["planned"]).sum(),
        "completed_per_s": whole.sum(),
        "output_tokens_per_s": (parts.tokens * parts.scale)[are_within(parts.time)].sum(),
        "prompt_tokens_per_s": measures.prompt_tokens(requests)[are_within(observed.first)].sum(),
    }
    start, end = observed.window
    return {name: float(total) / (end - start) for name, total in sums.items()}


def _counts(requests: Rows) -> dict[str, Any]:
    """Compare the numbers of tokens that the server reports with those that were received."""
    counted, reported = requests["output_tokens"], requests["usage_output_tokens"]
    checked = (counted >= 0) & (reported >= 0)
    return {
        "checked": int(checked.sum()),
        "miscounted": int((checked & (counted != reported)).sum()),
        "usage_output_tokens": int(reported[checked].sum()),
        "counted_output_tokens": int(counted[checked].sum()),
    }


def histograms(observed: Observed) -> dict[str, Histogram]:
    """Return the histogram of every distribution in a summary, by its name there."""
    requests, is_stream = observed.recording.requests, observed.recording.about.scenario.stream
    planned = measures.within(requests["planned"], observed.window)
    completed = planned & measures.is_whole(requests)
    times: dict[str, Times] = {
        "e2e": measures.since_planned(requests, requests["ended"])[completed],
        "e2e_sent": (requests["ended"] - requests["sent"])[completed],
        "queue": requests["queue_s"][completed],
        "lateness": measures.since_planned(requests, requests["sent"])[planned],
    }
    if is_stream:
        row, tpot = measures.samples(observed.chunks)
        times["ttft"] = measures.since_planned(requests, observed.first)[completed]
        times["ttft_sent"] = (observed.first - requests["sent"])[completed]
        times["tpot"] = tpot[completed[row]]
        _, times["gap"], tokens, itl = measures.token_gaps(observed.chunks, observed.window)
    every = {measure: times.get(measure, np.empty(0)) for measure in DISTRIBUTIONS}
    by_measure = {
        measure: Histogram(values[~np.isnan(values)]) for measure, values in every.items()
    }
    if is_stream:
        by_measure["itl"] = Histogram(itl, tokens)
    return by_measure
