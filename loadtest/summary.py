"""The summary of a run: its measures as data. docs/loadtest-measures.md has the formulas.

Reports, sweeps and comparisons read this and nothing else. Times are in seconds.
"""

from __future__ import annotations

import msgspec


class Distribution(msgspec.Struct, frozen=True):
    """One measure's statistics; all NaN if it has no values. Percentiles: of an HDR histogram."""

    count: int
    mean: float
    std: float
    min: float
    p50: float
    p90: float
    p95: float
    p99: float
    p999: float
    max: float


class Summary(msgspec.Struct, frozen=True):
    """One run, or one step of a sweep, between warm-up and cool-down."""

    name: str
    """A name such as `poisson 40/s` or `concurrent 16`."""
    window: tuple[float, float]
    """The measured interval, in seconds since the start."""
    planned: int
    """Requests whose planned time is in the window; all counts below are of these."""
    completed: int
    errors: dict[str, int]
    """Number of requests by kind of error, without `none`."""
    retried: int
    """Requests sent more than once."""
    rejected_share: float
    """Share of the planned requests."""
    planned_per_s: float
    completed_per_s: float
    """Replies that became whole in the window, whenever planned."""
    output_tokens_per_s: float
    """Tokens received in the window, of any request."""
    prompt_tokens_per_s: float
    """Prompt tokens of requests whose first token came in the window."""
    good_per_s: float
    """Completed requests that meet all objectives; NaN without objectives."""
    good_share: float
    concurrency: float
    """Requests under way, mean over the window's time."""
    concurrency_max: int
    ttft: Distribution
    """Time to first token, from the planned time."""
    ttft_sent: Distribution
    """Time to first token from the time of sending, as other tools report it: without lateness."""
    itl: Distribution
    """Gaps between tokens of one sample; tokens that come together share their gap."""
    gap: Distribution
    """Gaps between reads that brought tokens of one sample, however many they brought."""
    tpot: Distribution
    """Per sample: (last token - first token) / (tokens - 1)."""
    e2e: Distribution
    """Time until the reply is whole, from the planned time."""
    e2e_sent: Distribution
    """Time until the reply is whole, from the time of sending."""
    queue: Distribution
    """Time in the server's queue, as the server reports it."""
    lateness: Distribution
    """How late the harness sent requests: from the planned time to the sending."""
    checked: int
    """Replies whose tokens both the client and the server counted."""
    miscounted: int
    """Checked replies whose two counts differ."""
    usage_output_tokens: int
    counted_output_tokens: int
    cpu_share: float
    """Share of one core used by the busiest client process, mean over the window."""
    lag_max_s: float
    """The largest lag of a client process's event loop."""
    objectives: tuple[str, ...]
