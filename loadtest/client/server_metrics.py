"""The server's own metrics: its /metrics, read once a second during a run.

Read by a thread of its own, only the few families below, so that the run is not disturbed. Knows
the names that servers give to running, waiting and generated; nothing of requests.
"""

from __future__ import annotations

import math
import threading
import time
from contextlib import AbstractContextManager

import httpx
from prometheus_client.parser import text_string_to_metric_families

from srm.loadtest.recording import MetricSample

FAMILIES = (
    *("srm_engine_running_sequences", "srm_engine_waiting_sequences"),
    *("srm_engine_parked_sequences", "srm_engine_slot_usage", "srm_engine_steps_total"),
    *("srm_engine_decode_tokens_total", "srm_engine_prompt_tokens_total"),
    "srm_engine_sequences_total",
    *("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:num_preemptions_total"),
    *("vllm:prompt_tokens_total", "vllm:generation_tokens_total"),
    *("sglang:num_running_reqs", "sglang:num_queue_reqs"),
    *("sglang:prompt_tokens_total", "sglang:generation_tokens_total"),
    *("llamacpp:requests_processing", "llamacpp:requests_deferred"),
    *("llamacpp:prompt_tokens_total", "llamacpp:tokens_predicted_total"),
    *("tgi_batch_current_size", "tgi_queue_size"),
)
"""Metrics that are read of any server: samples of these names, summed over their labels."""
RUNNING = (
    *("srm_engine_running_sequences", "vllm:num_requests_running", "sglang:num_running_reqs"),
    *("llamacpp:requests_processing", "tgi_batch_current_size"),
)
"""Metrics of running sequences; the first that a server has is used."""
_EVERY_S = 1.0
_TIMEOUT_S = 5.0


def read(text: str) -> dict[str, float]:
    """Return sums over labels by name. Raises ValueError if this is no Prometheus text."""
    lines = [line for line in text.splitlines() if line.startswith(FAMILIES)]
    values: dict[str, float] = {}
    for family in text_string_to_metric_families("".join(f"{line}\n" for line in lines)):
        for sample in family.samples:
            if sample.name in FAMILIES and math.isfinite(sample.value):
                values[sample.name] = values.get(sample.name, 0.0) + sample.value
    return values


def running(values: dict[str, float]) -> float | None:
    """Return how many sequences ran according to a sample; None if it does not say."""
    return next((values[name] for name in RUNNING if name in values), None)


class MetricsSampler(AbstractContextManager["MetricsSampler"]):
    """Samples /metrics while the block runs. Omits failed samples; notes the first failure."""

    def __init__(self, url: str, api_key: str = "") -> None:
        """`url` is the server's, without /metrics; empty: nothing is sampled."""
        self.note = ""
        """Why samples are missing."""
        self.latest: dict[str, float] = {}
        self._url = url
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._unix_0 = time.time() - time.monotonic()
        self._taken: list[tuple[float, dict[str, float]]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._read_all, daemon=True)

    def __enter__(self) -> MetricsSampler:
        if self._url:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._url:
            self._thread.join()

    def samples(self, started_unix: float, seconds: float) -> list[MetricSample]:
        """Return the samples of a run that began then, in seconds since its start."""
        offset = self._unix_0 - started_unix
        return [
            MetricSample(time + offset, values)
            for time, values in self._taken
            if 0 <= time + offset <= seconds
        ]

    def _read_all(self) -> None:
        with httpx.Client(timeout=_TIMEOUT_S, headers=self._headers) as client:
            due = time.monotonic()
            while not self._over.is_set():
                self._read_one(client)
                due = max(due + _EVERY_S, time.monotonic())
                self._over.wait(due - time.monotonic())

    def _read_one(self, client: httpx.Client) -> None:
        asked = time.monotonic()
        try:
            # Servers that know this parameter, ours among them, send these families alone.
            reply = client.get(f"{self._url}/metrics", params={"name[]": FAMILIES})
            if not reply.is_success:  # of a 404 httpx would show the address with all families
                raise ValueError(
                    f"{reply.status_code} {reply.reason_phrase}; --metrics-url says where they "
                    "are, such as on an admin port, and none that they are not read"
                )
            values = read(reply.content.decode(errors="replace"))
        except (httpx.HTTPError, ValueError) as error:
            self.note = self.note or f"{self._url}/metrics: {error}".splitlines()[0]
            return
        if values:
            self.latest = values
            self._taken.append(((asked + time.monotonic()) / 2, values))
        else:
            self.note = self.note or f"{self._url}/metrics has none of the names that are known"
