"""Every metric of the engine, declared once; updated per step and per finished sequence.

Under a supervisor, values live in memory that all processes share (`srm.metrics_memory`), from
where any API process answers for all. A restarted engine goes on from the counts of the one before
it, and the gauges of one that is gone are taken away.

Nothing is observed token by token: `observe` and `observe_counts` take many values at once. Bucket
bounds hold those of vLLM, whose names `server.routes.scrape` gives to the same numbers, and go on
below and above them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
from prometheus_client import Counter, Gauge, Histogram

from srm import metrics_memory

_IS_RESTARTED = metrics_memory.join()

_LATENCY_SECONDS = (
    *(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50),
    *(60, 120, 240, 480, 960, 1920, 7680, 30720),
)
_TOKEN_SECONDS = (
    *(0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5),
    *(0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80),
)

_gauge = partial(Gauge, multiprocess_mode="livemostrecent")
_seconds = partial(Histogram, buckets=_LATENCY_SECONDS)
_token_seconds = partial(Histogram, buckets=_TOKEN_SECONDS)
_counts = partial(Histogram, buckets=metrics_memory.COUNTS)


def _labelled(name: str, meaning: str, label: str, values: tuple[str, ...]) -> Counter:
    counter = Counter(name, meaning, [label])
    for value in values:
        counter.labels(value)  # at 0 rather than absent, so that rates begin with the first one
    return counter


RESTARTS = Counter("srm_engine_restarts_total", "Engine processes started after the first one.")
RESTARTS.inc(_IS_RESTARTED)
STARTING_SINCE = _gauge(
    metrics_memory.STARTING_SINCE,
    "When the engine's process started, in Unix time, while it has not served yet; 0 once it does.",
)
STARTING_SINCE.set(time.time() if metrics_memory.own_region() else 0)
COMPILING = _gauge(
    metrics_memory.COMPILING, "1 while the engine compiles a graph, or waits for who does; else 0."
)
STEPS = Counter("srm_engine_steps_total", "Steps run.")
DECODE_TOKENS = Counter("srm_engine_decode_tokens_total", "Tokens sampled.")
MASKED_ROWS = Counter(
    "srm_engine_masked_rows_total", "Tokens sampled under a mask of their request's grammar."
)
TABLED_ROWS = Counter(
    "srm_engine_table_rows_total", "Tokens sampled under a table of their request's constraint."
)
MASK_SECONDS = Counter(
    "srm_engine_mask_seconds_total", "Seconds that making these masks took, beside steps or not."
)
PROMPT_TOKENS = Counter(
    "srm_engine_prompt_tokens_total",
    "Prompt tokens of the requests whose turn came, kept ones and the last one included.",
)
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
PREFIXES = _gauge("srm_engine_prefixes", "States of prompts that are kept, read or being made.")
SCORED_TOKENS = Counter(
    "srm_engine_scored_tokens_total", "Prompt tokens whose log-probability was asked for."
)
REQUESTS = _labelled(
    "srm_engine_requests_total",
    "Requests by outcome: finished, aborted, refused.",
    "outcome",
    ("finished", "aborted", "refused"),
)
REFUSALS = _labelled(
    "srm_engine_refusals_total",
    "Requests refused, by error code: invalid_request, context_length_exceeded, overloaded.",
    "reason",
    ("invalid_request", "context_length_exceeded", "overloaded"),
)
SEQUENCES = _labelled(
    "srm_engine_sequences_total",
    "Sequences ended, by finish reason: stop, length, error, abort.",
    "finish_reason",
    ("stop", "length", "error", "abort"),
)
RUNNING = _gauge("srm_engine_running_sequences", "Sequences that hold a slot.")
WAITING = _gauge(
    "srm_engine_waiting_sequences",
    "Sequences accepted and not yet started, but for those that `until` holds back.",
)
TABLE_BYTES = _gauge("srm_engine_table_bytes", "Bytes of the tables of running constraints.")
GRAMMAR_BYTES = _gauge(
    "srm_engine_grammar_bytes",
    "Bytes of compiled constraints, kept or in use, with what they have learnt of texts.",
)
PARKED = _gauge(
    "srm_engine_parked_sequences",
    "Sequences that gave up their slot to others and wait for one to go on in.",
)
PARKINGS = Counter("srm_engine_parked_total", "Times that a sequence gave up its slot to others.")
RESUMED = Counter(
    "srm_engine_resumed_total",
    "Times that a parked sequence, or one of an earlier engine, went on in a slot.",
)
FREE_SLOTS = _gauge("srm_engine_free_slots", "Slots that nothing holds.")
NUM_SLOTS = _gauge("srm_engine_num_slots", "Slots of the state pool for sequences.")
SLOT_USAGE = _gauge("srm_engine_slot_usage", "Share of the slots that sequences hold, 0 … 1.")
CONTEXT_TOKENS = _gauge(
    "srm_engine_context_tokens", "Longest sequence that a slot can hold, in tokens."
)
WEIGHTS_VERSION = _gauge(
    "srm_weights_version", "Counts the weights that were put to use, the first ones included."
)
WEIGHTS_FINGERPRINT = _gauge(
    "srm_weights_fingerprint",
    "The weights in use as a number, which is the same on every server with the same weights.",
)
WEIGHT_SWAPS = _labelled(
    "srm_weight_swaps_total",
    "Changes of weights asked for, by result: done, refused.",
    "result",
    ("done", "refused"),
)
WEIGHT_SWAP_SECONDS = Histogram(
    "srm_weight_swap_seconds",
    "How long no step was made for a change of weights.",
    buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100),
)
HELD_SECONDS = _gauge(
    "srm_engine_held_seconds",
    "For how long nothing has started because weights are being changed; 0 where things start.",
)
STEP_SECONDS = Histogram(
    "srm_engine_step_seconds",
    "Time from one step's result to the next one's, or from its start when idle before.",
    buckets=(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10),
)
BATCH_ROWS = Histogram(
    "srm_engine_batch_rows",
    "Rows of a step, decode and prefill.",
    buckets=[4**power for power in range(11)],
)
STEP_TOKENS = Histogram(
    "srm_engine_step_tokens",
    "Tokens fed by a step, decode and prefill.",
    buckets=[2**power for power in range(23)],
)
FIRST_TOKEN_SECONDS = Histogram(
    "srm_engine_time_to_first_token_seconds",
    "From a request's arrival to the first token, of each sequence.",
    buckets=metrics_memory.FIRST_TOKEN_SECONDS,
)
INTER_TOKEN_SECONDS = _token_seconds(
    "srm_engine_inter_token_latency_seconds",
    "Between two tokens of a sequence, of each token but a sequence's first.",
)
SEQUENCE_SECONDS = _seconds(
    "srm_engine_sequence_seconds", "From a request's arrival to the last token, of each sequence."
)
SEQUENCE_QUEUE_SECONDS = _seconds(
    "srm_engine_sequence_queue_seconds",
    "From a request's arrival to the start of its prefill or, of sequences that find no slot after "
    "it or that `until` held back, to their slot.",
)
SEQUENCE_PREFILL_SECONDS = _seconds(
    "srm_engine_sequence_prefill_seconds", "From then to the first token, of each sequence."
)
SEQUENCE_DECODE_SECONDS = _seconds(
    "srm_engine_sequence_decode_seconds", "From the first token to the last one, of each sequence."
)
SEQUENCE_INFERENCE_SECONDS = _seconds(
    "srm_engine_sequence_inference_seconds", "Prefill and decode together, of each sequence."
)
SEQUENCE_TOKEN_SECONDS = _token_seconds(
    "srm_engine_sequence_time_per_output_token_seconds",
    "Decode time by token, of each sequence of two tokens or more.",
)
SEQUENCE_TOKENS = _counts("srm_engine_sequence_tokens", "Tokens of a sequence.")
REQUEST_SECONDS = _seconds(
    "srm_engine_request_seconds", "From a request's arrival to the end of its last sequence."
)
REQUEST_PROMPT_TOKENS = _counts("srm_engine_request_prompt_tokens", "Prompt tokens of a request.")
REQUEST_TOKENS = _counts("srm_engine_request_tokens", "Tokens of a request, all its sequences.")
REQUEST_LONGEST = _counts(
    "srm_engine_request_longest_tokens", "Tokens of a request's longest sequence."
)
REQUEST_N = _counts("srm_engine_request_params_n", "Sequences that a request asked for.")
REQUEST_MAX_TOKENS = _counts("srm_engine_request_params_max_tokens", "max_tokens of a request.")


SNAPSHOTS = _labelled(
    "srm_snapshots_total",
    "Snapshots of batches' requests: written, failed, or refused when they were to be read.",
    "result",
    ("written", "failed", "refused"),
)
SNAPSHOT_SECONDS = Histogram(
    "srm_snapshot_seconds",
    "From a snapshot's first row read to its place on the disk.",
    buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300),
)
SNAPSHOT_BYTES = _gauge("srm_snapshot_bytes", "Size of the last snapshot written.")
RESTORED = Counter(
    "srm_restored_sequences_total",
    "Sequences that went on from a snapshot, or from what was kept when their client went.",
)


def observe(histogram: Histogram, values: npt.NDArray[np.float64 | np.int64]) -> None:
    """Observe many values at the cost of a few."""
    if len(values):
        _add(histogram, np.searchsorted(histogram._upper_bounds, values), None, values.sum())


def observe_counts(histogram: Histogram, counted: Sequence[tuple[float, int]]) -> None:
    """Observe each value as many times as its count says."""
    if counted:
        values, counts = np.array(counted).T
        places = np.searchsorted(histogram._upper_bounds, values)
        _add(histogram, places, counts, values @ counts)


def _add(
    histogram: Histogram,
    places: npt.NDArray[np.intp],
    counts: npt.NDArray[np.float64] | None,
    total: float,
) -> None:
    # The library offers one observation at a time; this is what its `observe` does for one.
    sums = np.bincount(places, weights=counts)
    for place in np.flatnonzero(sums).tolist():
        histogram._buckets[place].inc(float(sums[place]))
    histogram._sum.inc(float(total))
