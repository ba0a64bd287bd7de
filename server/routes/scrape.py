"""GET /metrics: what all processes measured, under our names and under vLLM's.

Under a supervisor any API process answers for all processes, the engine included, out of the memory
that they share (`srm.metrics_memory`); else a process answers for itself. Everything is measured
once: the second names are given here, while answering. Of several engines each one's samples have
its number as the label `engine`. The event loop does not wait: one thread reads for all who ask at
the same time.
"""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Query
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    REGISTRY,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector
from starlette.responses import Response

from srm import metrics_memory
from srm.logs import PROCESS_NAME
from srm.metrics_memory import Read, Region
from srm.server.schema.openapi import Operation

OPERATIONS = (
    Operation("GET", "/metrics", "Metrics of all processes, in Prometheus text format.",
              ("text/plain",), queries={"name[]": "Only metrics of these names."}),
)  # fmt: skip

VLLM_NAMES = {
    "vllm:num_requests_running": "srm_engine_running_sequences",
    "vllm:num_requests_waiting": "srm_engine_waiting_sequences",
    "vllm:num_requests_waiting_by_reason": "srm_engine_waiting_sequences",
    "vllm:num_requests_swapped": "srm_engine_parked_sequences",
    "vllm:num_preemptions": "srm_engine_parked",
    "vllm:kv_cache_usage_perc": "srm_engine_slot_usage",
    "vllm:prompt_tokens": "srm_engine_prompt_tokens",
    "vllm:generation_tokens": "srm_engine_decode_tokens",
    "vllm:request_success": "srm_engine_sequences",
    "vllm:prefix_cache_queries": "srm_engine_prompt_tokens",
    "vllm:prefix_cache_hits": "srm_engine_cached_tokens",
    "vllm:prompt_tokens_cached": "srm_engine_cached_tokens",
    "vllm:admission_rejections": "srm_engine_refusals",
    "vllm:iteration_tokens_total": "srm_engine_step_tokens",
    "vllm:time_to_first_token_seconds": "srm_engine_time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds": "srm_engine_inter_token_latency_seconds",
    "vllm:request_time_per_output_token_seconds": (
        "srm_engine_sequence_time_per_output_token_seconds"
    ),
    "vllm:e2e_request_latency_seconds": "srm_engine_sequence_seconds",
    "vllm:request_queue_time_seconds": "srm_engine_sequence_queue_seconds",
    "vllm:request_prefill_time_seconds": "srm_engine_sequence_prefill_seconds",
    "vllm:request_decode_time_seconds": "srm_engine_sequence_decode_seconds",
    "vllm:request_inference_time_seconds": "srm_engine_sequence_inference_seconds",
    "vllm:request_generation_tokens": "srm_engine_sequence_tokens",
    "vllm:request_prompt_tokens": "srm_engine_request_prompt_tokens",
    "vllm:request_max_num_generation_tokens": "srm_engine_request_longest_tokens",
    "vllm:request_params_n": "srm_engine_request_params_n",
    "vllm:request_params_max_tokens": "srm_engine_request_params_max_tokens",
}
"""Our families by their vLLM names, for dashboards made for vLLM. Counters without `_total`."""
VLLM_LABELS = {"finish_reason": "finished_reason"}
"""Our labels that vLLM names otherwise, with its names."""
VLLM_OWN_LABELS = {"vllm:num_requests_waiting_by_reason": {"reason": "capacity"}}
"""Labels that only vLLM has, of what has one value here: all that waits does so for a slot."""
VLLM_BY_SOURCE = "vllm:prompt_tokens_by_source"
VLLM_CACHE_CONFIG = "vllm:cache_config_info"


class Scrape:
    """The metrics of all processes, read by one thread at a time."""

    def __init__(self, update: Callable[[], None]) -> None:
        """`update` sets the gauges that are set nowhere else; it may block."""
        self._update = update
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="metrics")
        self._running: asyncio.Task[list[Metric]] | None = None
        self._next: asyncio.Task[list[Metric]] | None = None

    async def families(self) -> list[Metric]:
        """Return metrics read after this call. Callers during a read share the next one."""
        if self._next is None:
            self._next = asyncio.create_task(self._read_after(self._running))
        return await asyncio.shield(self._next)  # one of several who wait may leave

    async def _read_after(self, earlier: asyncio.Task[list[Metric]] | None) -> list[Metric]:
        if earlier is not None:
            await asyncio.wait([earlier])
        self._running, self._next = self._next, None
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, self._update)
        return await loop.run_in_executor(self._thread, read_families)


def read_families() -> list[Metric]:
    """Everything measured, merged over processes."""
    region = metrics_memory.own_region()
    return list(REGISTRY.collect()) if region is None else [*merged(region), *_of_processes()]


def _of_processes() -> list[Metric]:
    """The library's metrics of a process, of the supervisor and each process that it started."""
    families: dict[str, Metric] = {}
    supervisor = os.getppid()
    for pid in (supervisor, *_children(supervisor)):
        # What is gone has no metrics.
        for family in ProcessCollector(pid=partial(int, pid), registry=None).collect():
            merged_family = families.setdefault(
                family.name, Metric(family.name, family.documentation, family.type)
            )
            for sample in family.samples:
                name = _process_name(pid) if pid != supervisor else "supervisor"
                merged_family.add_sample(sample.name, {"process": name}, sample.value)
    return list(families.values())


def _children(pid: int) -> list[int]:
    try:
        return [*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]
    except OSError:  # not every kernel says it
        return [os.getpid()]


def _process_name(pid: int) -> str:
    """What the log calls it."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return ""
    name = f"{PROCESS_NAME}=".encode()
    matches = (
        variable.removeprefix(name).decode() for variable in variables if variable.startswith(name)
    )
    return next(matches, "")


def merged(region: Region) -> list[Metric]:
    """What all processes of the memory measured: those without a label as one, others beside it."""
    by_label: defaultdict[str, list[list[Read]]] = defaultdict(list)
    for label, values in region.read():
        by_label[label].append(values)
    families: dict[str, Metric] = {}
    for engine, processes in sorted(by_label.items()):
        extra_labels = {"engine": engine} if engine else {}
        for family in _sums(processes):
            samples = [
                sample._replace(labels={**sample.labels, **extra_labels})
                for sample in family.samples
            ]
            if family.name not in families:
                families[family.name] = Metric(family.name, family.documentation, family.type)
            families[family.name].samples += samples
    return list(families.values())


def _sums(processes: list[list[Read]]) -> Iterable[Metric]:
    """Make one of the values of several processes, as the library does of those in its files."""
    families: dict[str, Metric] = {}
    for number, values in enumerate(processes):
        for key, value, timestamp in values:
            if key.family not in families:
                families[key.family] = family = Metric(key.family, key.meaning, key.kind)
                family._multiprocess_mode = key.mode  # type: ignore[attr-defined]  # its own habit
            labels = (*key.labels, ("pid", str(number))) if key.kind == "gauge" else key.labels
            families[key.family].add_sample(key.name, labels, value, timestamp)  # type: ignore[arg-type]  # so does it
    sums: Iterable[Metric] = MultiProcessCollector._accumulate_metrics(families, accumulate=True)  # type: ignore[no-untyped-call]
    return sums


def with_vllm_names(families: Iterable[Metric], model_name: str) -> list[Metric]:
    """Return the families, and again those that vLLM names, with its names and labels."""
    by_name = {family.name: family for family in families}
    labels = {"model_name": model_name, "engine": "0"}
    metrics = list(by_name.values())
    for name, source in VLLM_NAMES.items():
        if source in by_name:
            own = labels | VLLM_OWN_LABELS.get(name, {})
            metrics.append(_renamed(by_name[source], name, own))
    metrics += _by_source(by_name, labels)
    slots, contexts = (
        by_name[name].samples if name in by_name else []
        for name in ("srm_engine_num_slots", "srm_engine_context_tokens")
    )
    config = Metric(VLLM_CACHE_CONFIG, "A slot as a block: it holds one context.", "gauge")
    for slot, context in zip(slots, contexts, strict=False):  # of each engine
        sizes = {"num_gpu_blocks": f"{slot.value:.0f}", "block_size": f"{context.value:.0f}"}
        config.add_sample(VLLM_CACHE_CONFIG, {**labels, **slot.labels, **sizes}, 1)
    return [*metrics, config] if config.samples else metrics


def _by_source(by_name: Mapping[str, Metric], labels: Mapping[str, str]) -> list[Metric]:
    """Return prompt tokens by where their states come from, of each engine; none if they are not
    counted."""
    by_labels: defaultdict[tuple[tuple[str, str], ...], dict[str, float]] = defaultdict(dict)
    names = ("srm_engine_prompt_tokens", "srm_engine_cached_tokens")
    for name in names:
        for sample in by_name[name].samples if name in by_name else ():
            if sample.name.endswith("_total"):
                by_labels[tuple(sorted(sample.labels.items()))][name] = sample.value
    family = Metric(VLLM_BY_SOURCE, "Prompt tokens that were prefilled, and kept ones.", "counter")
    for own, values in by_labels.items():
        prompt, cached = (values.get(name, 0.0) for name in names)
        for source, value in (("local_compute", prompt - cached), ("local_cache_hit", cached)):
            family.add_sample(
                f"{VLLM_BY_SOURCE}_total", {**labels, **dict(own), "source": source}, value
            )
    return [family] if family.samples else []


def _renamed(family: Metric, name: str, labels: Mapping[str, str]) -> Metric:
    renamed = Metric(name, f"The same as {family.name}.", family.type)
    for sample in family.samples:
        suffix = sample.name.removeprefix(family.name)
        if suffix != "_created":
            extra_labels = {
                VLLM_LABELS.get(label, label): value for label, value in sample.labels.items()
            }
            renamed.add_sample(name + suffix, {**labels, **extra_labels}, sample.value)
    return renamed


class _Read(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _text(families: list[Metric], model_name: str, names: frozenset[str]) -> bytes:
    """Prometheus' text format, of the named families only if any is named."""
    shown = with_vllm_names(families, model_name)
    if names:
        shown = [
            vllm_name for vllm_name in shown if {vllm_name.name, vllm_name.name + "_total"} & names
        ]
    return generate_latest(_Read(shown))


def add_routes(router: APIRouter, model_name: str, update: Callable[[], None]) -> None:
    """Add the routes of this module; `update` is that of `Scrape`."""
    scrape = Scrape(update)

    @router.get("/metrics")
    async def metrics(names: Annotated[list[str], Query(alias="name[]")] = []) -> Response:  # noqa: B006
        """Prometheus text format; of the families in `name[]` only, if there are any."""
        families = await scrape.families()
        text = await asyncio.to_thread(_text, families, model_name, frozenset(names))
        return Response(text, media_type=CONTENT_TYPE_LATEST)
