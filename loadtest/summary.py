"""What is said of a run: its measures as data. docs/loadtest-measures.md has the formulas.

Reports, sweeps and comparisons read this and nothing else. Times are in seconds.
"""

from __future__ import annotations

import msgspec


class Distribution(msgspec.Struct, frozen=True):
    """Of one measure; all NaN if nothing was measured. Percentiles are of an HDR histogram."""

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
    """Such as `poisson 40/s` or `concurrent 16`."""
    window: tuple[float, float]
    """Seconds since the start that are measured."""
    planned: int
    """Requests whose planned time is in the window; all counts below are of these."""
    completed: int
    errors: dict[str, int]
    """How many ended by each kind of error, `none` left out."""
    retried: int
    """Sent more than once."""
    rejected_share: float
    """Of the planned."""
    planned_per_s: float
    completed_per_s: float
    """Replies that became whole in the window, whenever they were planned."""
    output_tokens_per_s: float
    """Tokens received in the window, of whatever request."""
    prompt_tokens_per_s: float
    """Of requests whose first token came in the window."""
    good_per_s: float
    """Completed requests that meet all objectives; NaN without objectives."""
    good_share: float
    concurrency: float
    """Requests under way, mean over the window's time."""
    concurrency_max: int
    ttft: Distribution
    """Time to first token, from the planned time."""
    ttft_sent: Distribution
    """The same from the time of sending, as other tools tell it: leaves out how late that was."""
    itl: Distribution
    """Gaps between tokens of one sample; tokens that come together share their gap."""
    gap: Distribution
    """Gaps between reads that brought tokens of one sample, however many they brought."""
    tpot: Distribution
    """Per sample: (last token - first token) / (tokens - 1)."""
    e2e: Distribution
    """Until the reply is whole, from the planned time."""
    e2e_sent: Distribution
    """The same from the time of sending."""
    queue: Distribution
    """As the server tells it."""
    lateness: Distribution
    """Of the harness: from the planned time to the sending."""
    checked: int
    """Replies whose tokens the client could count and the server told."""
    miscounted: int
    """Of these, where both differ."""
    usage_output_tokens: int
    counted_output_tokens: int
    cpu_share: float
    """Of one core: the busiest client process, mean over the window."""
    lag_max_s: float
    """How late the event loop of a client process was, at worst."""
    objectives: tuple[str, ...]
