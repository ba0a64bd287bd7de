"""Every measure as arrays, derived from a recording and a window of time.

docs/loadtest-measures.md has the formulas. A window includes its start and excludes its end.
Measures of requests cover those planned in the window; measures of tokens cover those received in
it, however their request ended. NaN stands for what was not measured.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from srm.errors import ConfigError
from srm.loadtest.analysis.chunks import Chunks
from srm.loadtest.analysis.window import Window
from srm.loadtest.objectives import NEED_STREAMS, parse
from srm.loadtest.recording import CLIENT, ERRORS, Counts, Flags, Recording, Rows, Times


def within(times: Times, window: Window) -> Flags:
    """Whether each time is in the window; NaN never is."""
    return np.asarray((times >= window[0]) & (times < window[1]))


def is_whole(requests: Rows) -> Flags:
    """[requests] Whether each was answered without an error."""
    return np.asarray(requests["error"] == ERRORS.index("none"))


def since_planned(requests: Rows, times: Times) -> Times:
    """[requests] Times counted from the planned times, so that waiting for a turn is included."""
    return np.asarray(times - requests["planned"], np.float64)


def token_gaps(chunks: Chunks, window: Window) -> tuple[Times, Times, Counts, Times]:
    """Return the gaps of chunks read in the window that are not the first of their sample.

    Returns four arrays: when the chunk was read; the time since the sample's previous chunk; the
    tokens that came with it; and the ITL that each of these tokens has: gap / (tokens · scale).
    """
    later = chunks.later[within(chunks.time[chunks.later], window)]
    times, tokens = chunks.time[later], chunks.tokens[later]
    gaps = times - chunks.time[later - 1]
    return times, gaps, tokens, gaps / (tokens * chunks.scale[later])


def samples(chunks: Chunks) -> tuple[Counts, Times]:
    """[samples] Return the row of each sample's request, and TPOT: (last token - first) / (tokens -
    1).

    TPOT is NaN for samples that came in one chunk, since how long their tokens took was not seen,
    and for those that scaling leaves no second token.
    """
    starts = chunks.starts
    ends = np.append(starts[1:], len(chunks.row))[: len(starts)] - 1
    row = chunks.row[starts]
    tokens = np.add.reduceat(chunks.tokens, starts) if len(starts) else np.empty(0)
    tokens = tokens * chunks.scale[starts]
    tpot = np.full(len(starts), np.nan)
    seen = (ends > starts) & (np.rint(tokens) > 1)
    np.divide(chunks.time[ends] - chunks.time[starts], tokens - 1, out=tpot, where=seen)
    return row, tpot


def first_tokens(requests: Rows, chunks: Chunks) -> Times:
    """[requests] When the first token of any sample was read; NaN: never."""
    first = np.full(len(requests), np.nan)
    np.fmin.at(first, chunks.row[chunks.starts], chunks.time[chunks.starts])
    return first


def worst_tpot(requests: Rows, chunks: Chunks) -> Times:
    """[requests] The largest TPOT of each request's samples."""
    worst = np.full(len(requests), np.nan)
    np.fmax.at(worst, *samples(chunks))
    return worst


def mean_itl(requests: Rows, chunks: Chunks) -> Times:
    """[requests] The mean over all tokens, of all samples, that are not in a first chunk."""
    later = chunks.later
    row = chunks.row[later]
    gaps = chunks.time[later] - chunks.time[later - 1]
    total = np.bincount(row, gaps, len(requests))
    tokens = np.bincount(row, chunks.tokens[later] * chunks.scale[later], len(requests))
    mean = np.full(len(requests), np.nan)
    np.divide(total, tokens, out=mean, where=tokens > 0)
    return mean


def good_requests(recording: Recording, chunks: Chunks, objectives: Iterable[str]) -> Flags:
    """[requests] Whether each meets all of the objectives, regardless of how it ended.

    A request without a first token does not meet an objective of TTFT; one without a second token
    cannot fail those of TPOT and ITL. Raises ConfigError for an objective that is invalid, or that
    needs a stream if there is none.
    """
    requests, is_stream = recording.requests, recording.about.scenario.stream
    values = {
        "ttft": lambda: since_planned(requests, first_tokens(requests, chunks)),
        "tpot": lambda: worst_tpot(requests, chunks),
        "itl": lambda: mean_itl(requests, chunks),
        "e2e": lambda: since_planned(requests, requests["ended"]),
    }
    good = np.ones(len(requests), bool)
    for objective in map(parse, objectives):
        if objective.name in NEED_STREAMS and not is_stream:
            raise ConfigError(f"objective {objective.text!r} cannot be judged without `stream`")
        times = values[objective.name]()
        good &= objective.holds(times) | (np.isnan(times) & (objective.name in {"tpot", "itl"}))
    return good


def prompt_tokens(requests: Rows) -> Times:
    """[requests] Prompt tokens as the client made them, else as the server counts them."""
    made, reported = requests["prompt_tokens"], requests["usage_prompt_tokens"]
    return np.where(made >= 0, made, np.where(reported >= 0, reported, np.nan))


def concurrency(begins: Times, ends: Times, window: Window) -> tuple[float, int]:
    """Return mean over the window's time, and maximum, of how many are in [begin, end) at once.

    Those whose begin is NaN never began.
    """
    there = ~np.isnan(begins)
    begins, ends = np.sort(begins[there]), np.sort(ends[there])
    seconds = np.clip(ends, *window).sum() - np.clip(begins, *window).sum()
    moments = np.append(begins[within(begins, window)], window[0])
    return float(seconds) / (window[1] - window[0]), int(under_way(begins, ends, moments).max())


def under_way(begins: Times, ends: Times, moments: Times) -> Counts:
    """Count those in [begin, end) at each of the moments; begins and ends are sorted."""
    return np.searchsorted(begins, moments, "right") - np.searchsorted(ends, moments, "right")


def client_load(clients: Rows, window: Window) -> tuple[float, float]:
    """Return the mean CPU share of the busiest process in the window, and the worst lag of any.

    An interval that is partly in the window counts by that part. The first interval of a process
    began with the run.
    """
    assert clients.dtype == CLIENT
    shares, lags = [], []
    for worker in np.unique(clients["worker"]):
        rows = clients[clients["worker"] == worker]
        rows = rows[np.argsort(rows["time"], kind="stable")]
        begins = np.concatenate([[min(0.0, rows["time"][0])], rows["time"][:-1]])
        length = rows["time"] - begins
        inside = np.clip(rows["time"], *window) - np.clip(begins, *window)
        part = inside > 0
        if part.any():
            used = rows["cpu_s"][part] * inside[part] / length[part]
            shares.append(used.sum() / inside.sum())
            lags.append(rows["lag_s"][part].max())
    return float(max(shares, default=np.nan)), float(max(lags, default=np.nan))
