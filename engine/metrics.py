"""Every metric of the engine, declared once; updated per step and per finished sequence.

With `PROMETHEUS_MULTIPROC_DIR` set before this is imported (the supervisor does), values live in
files of that directory, from where any API process answers for all. A restarted engine replaces the
gauges of the one before it.
"""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

STEPS = Counter("srm_engine_steps_total", "Steps run.")
DECODE_TOKENS = Counter("srm_engine_decode_tokens_total", "Tokens sampled.")
PREFILL_TOKENS = Counter(
    "srm_engine_prefill_tokens_total",
    "Prompt tokens prefilled: once per prompt, whatever n; the last one is fed by decode rows.",
)
CACHED_TOKENS = Counter(
    "srm_engine_cached_tokens_total",
    "Prompt tokens not prefilled, because the state after them was kept.",
)
PREFIX_HITS = Counter(
    "srm_engine_prefix_hits_total", "Requests that began from a kept state of their prompt."
)
PREFIX_EVICTIONS = Counter(
    "srm_engine_prefix_evictions_total", "Kept states that made room for others."
)
PREFIXES = Gauge(
    "srm_engine_prefixes",
    "States of prompts that are kept, read or being made.",
    multiprocess_mode="mostrecent",
)
SCORED_TOKENS = Counter(
    "srm_engine_scored_tokens_total", "Prompt tokens whose log-probability was asked for."
)
REQUESTS = Counter(
    "srm_engine_requests_total", "Requests by outcome: finished, aborted, refused.", ["outcome"]
)
SEQUENCES = Counter(
    "srm_engine_sequences_total",
    "Sequences ended, by finish reason: stop, length, error.",
    ["finish_reason"],
)
RUNNING = Gauge(
    "srm_engine_running_sequences", "Sequences that hold a slot.", multiprocess_mode="mostrecent"
)
WAITING = Gauge(
    "srm_engine_waiting_sequences",
    "Sequences accepted and not yet started.",
    multiprocess_mode="mostrecent",
)
FREE_SLOTS = Gauge(
    "srm_engine_free_slots", "Slots that nothing holds.", multiprocess_mode="mostrecent"
)
NUM_SLOTS = Gauge(
    "srm_engine_num_slots", "Slots of the state pool for sequences.", multiprocess_mode="mostrecent"
)
STEP_SECONDS = Histogram(
    "srm_engine_step_seconds",
    "Time from one step's result to the next one's, or from its start when idle before.",
    buckets=(
        0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10,
    ),
)  # fmt: skip
BATCH_ROWS = Histogram(
    "srm_engine_batch_rows",
    "Rows of a step, decode and prefill.",
    buckets=[4**power for power in range(11)],
)
