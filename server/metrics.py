"""Every metric of the API processes, declared once.

Metrics move once per request or per event of a stream, never per token. Labels come from fixed
sets. `server.routes.scrape` shows them, with the engine's.
"""

from __future__ import annotations

from functools import partial

from prometheus_client import Counter, Gauge, Histogram

from srm import metrics_memory

metrics_memory.join()

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
_EVENT_SECONDS = (
    *(0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80),
)

_seconds = partial(Histogram, buckets=_SECONDS)
_counts = partial(Histogram, buckets=metrics_memory.COUNTS)
_sum = partial(Gauge, multiprocess_mode="livesum")
_latest = partial(Gauge, multiprocess_mode="mostrecent")

HTTP_REQUESTS = Counter(
    "http_requests_total", "Replies, by route, method and status.", ("handler", "method", "status")
)
HTTP_SECONDS = _seconds(
    "http_request_seconds",
    "From the request's first byte to the reply's last.",
    ("handler", "method"),
)
HTTP_IN_FLIGHT = _sum("http_requests_in_flight", "Requests being answered.")
TIME_TO_FIRST_TOKEN = Histogram(
    "srm_time_to_first_token_seconds",
    "From a completion request to its first output.",
    buckets=metrics_memory.FIRST_TOKEN_SECONDS,
)
INTER_TOKEN_LATENCY = Histogram(
    "srm_inter_token_latency_seconds", "Between two events of a stream.", buckets=_EVENT_SECONDS
)
E2E_REQUEST_LATENCY = _seconds(
    "srm_e2e_request_latency_seconds", "From a completion request to its last token."
)
PROMPT_TOKENS = Counter("srm_prompt_tokens_total", "Prompt tokens of answered requests.")
TOKENIZED_TOKENS = Counter(
    "srm_tokenized_tokens_total",
    "Tokens made of the texts of prompts; token ids that requests bring are none.",
)
COMPLETION_TOKENS = Counter(
    "srm_completion_tokens_total", "Tokens delivered by answered and cancelled requests."
)
REQUEST_PROMPT_TOKENS = _counts("srm_request_prompt_tokens", "Prompt tokens of a request.")
REQUEST_COMPLETION_TOKENS = _counts(
    "srm_request_generation_tokens",
    "Tokens of a request, all choices; of one whose client left, all that were sampled.",
)
REQUEST_CHOICES = _counts("srm_request_params_n", "Completions asked for by a request.")
CONSTRAINT_WAIT_SECONDS = _seconds(
    "srm_constraint_wait_seconds",
    "From when a constraint was first asked for until it is begun to be compiled.",
)
CONSTRAINTS_WAITING = _sum(
    "srm_constraints_waiting",
    "Constraints that are being compiled or wait for it, before the engine has them.",
)
CACHE_BYTES = _sum(
    "srm_cache_bytes",
    "Bytes that API and jobs processes keep to save work: constraints, what events of streams have "
    "in common, and where stop strings begin.",
    ("cache",),
)
BATCH_LINES = Counter(
    "srm_batch_lines_total",
    "Lines of batches that are through, by their results.",
    ("result",),
)
BATCH_LINES_IN_FLIGHT = _sum(
    "srm_batch_lines_in_flight", "Lines of batches that are being answered."
)
BATCH_RETRIES = Counter(
    "srm_batch_retries_total", "Lines sent again, since the engine went away or its queue was full."
)
BATCH_JOURNAL_ERRORS = Counter(
    "srm_batch_journal_errors_total", "Attempts to write results that the disk did not take."
)
FILES_BYTES = _latest(
    "srm_files_bytes", "What all files count for in quotas, those of batches included."
)
BATCHES = _latest("srm_batches", "Batches by status.", ("status",))
ENGINE_UP = _latest(
    "srm_engine_up",
    "1 where /ready counts the engine, 0 where it starts, is stalled, drains or is gone.",
    ("engine",),
)
ENGINE_INFO = _latest(
    "srm_engine_info",
    "Always 1: the device of an engine that has answered, its dtype, and the product of a GPU.",
    ("engine", "device"),
)
DATA_FREE = _latest("srm_data_free_bytes", "Free space on the disk of data_dir.")
DATA_SIZE = _latest("srm_data_size_bytes", "Size of the disk of data_dir.")
BUILD_INFO = _latest(
    "srm_build_info",
    "Always 1: the versions of this server, and the commit of a checkout.",
    ("version", "commit", "python", "max"),
)
