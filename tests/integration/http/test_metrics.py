"""/metrics over HTTP: vLLM's names beside ours, labels from fixed sets, one read for many."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from srm.metrics_memory import COUNTS_BYTES, GAUGES_BYTES, Region, create
from srm.server.routes import scrape
from tests.kit.serving import NUM_SLOTS, ROOT, TEXT_MODEL, Server, error_of

LABELS = {"model_name": "tiny", "engine": "0"}
BUCKETS = {
    "time_to_first_token_seconds": "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 "
    "7.5 10 20 40 80 160 640 2560",
    "inter_token_latency_seconds": "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 "
    "7.5 10 20 40 80",
    "e2e_request_latency_seconds": "0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 "
    "1920 7680",
    "request_queue_time_seconds": "0.3 0.5 0.8 1 7680",
    "request_params_n": "1 2 5 10 20 1000000",
    "iteration_tokens_total": "1 8 16 32 64 128 256 512 1024 2048 4096 8192 16384 4194304",
    "request_generation_tokens": "1 2 5 10 100000 500000",
}


def families(text: str) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(text)}


def value(entries: dict[str, Metric], family: str, sample: str = "", **labels: str) -> float:
    (only,) = [
        text.value
        for text in entries[family].samples
        if text.name == (sample or family) and labels.items() <= text.labels.items()
    ]
    return only


def test_vllms_names_say_what_ours_say(server: Server) -> None:
    server.wait_until_idle()
    before = families(server.get("/metrics").text)
    server.post(n=7, max_tokens=4, ignore_eos=True)
    result = families(server.get("/metrics").text)
    for theirs, ours in scrape.VLLM_NAMES.items():
        assert result[theirs].type == result[ours].type
        assert result[ours].samples
        for text, other in zip(result[theirs].samples, result[ours].samples, strict=True):
            named = {scrape.VLLM_LABELS.get(name, name): v for name, v in other.labels.items()}
            assert (text.name.replace(theirs, ours, 1), text.value) == (other.name, other.value)
            assert {**text.labels} == LABELS | named | scrape.VLLM_OWN_LABELS.get(theirs, {})
    unchanged = ("num_requests_running", "num_requests_waiting", "num_requests_swapped")
    for name, sample, growth in (
        *((name, "", 0) for name in (*unchanged, "kv_cache_usage_perc")),
        ("num_preemptions", "_total", 0),
        ("generation_tokens", "_total", 28),
        ("time_to_first_token_seconds", "_count", 7),
        ("inter_token_latency_seconds", "_count", 21),
        ("e2e_request_latency_seconds", "_count", 7),
        ("request_queue_time_seconds", "_count", 7),
        ("request_params_n", "_count", 1),
        ("request_params_n", "_sum", 7),
    ):
        family = f"vllm:{name}"
        now, then = (value(item, family, family + sample) for item in (result, before))
        assert now - then == growth, name
    sources = [
        value(result, scrape.VLLM_BY_SOURCE, f"{scrape.VLLM_BY_SOURCE}_total", source=source)
        for source in ("local_compute", "local_cache_hit")
    ]
    assert sum(sources) == value(result, "vllm:prompt_tokens", "vllm:prompt_tokens_total")
    assert sources[1] == value(
        result, "vllm:prompt_tokens_cached", "vllm:prompt_tokens_cached_total"
    )
    config = {"num_gpu_blocks": str(NUM_SLOTS), "block_size": str(TEXT_MODEL.n_ctx)}
    assert value(result, "vllm:cache_config_info", **LABELS, **config) == 1


def test_buckets_hold_those_of_vllm_and_reach_what_we_serve(server: Server) -> None:
    text = server.get("/metrics").text
    for name, bounds in BUCKETS.items():
        series = rf'^vllm:{name}_bucket{{.*le="([^"]+)"'
        members = {float(le) for le in re.findall(series, text, re.MULTILINE)}
        assert {float(bound) for bound in bounds.split()} <= members, name


def test_a_part_can_be_asked_for(server: Server) -> None:
    names = ["srm_engine_steps_total", "vllm:num_requests_running", "srm_engine_step_seconds", "no"]
    reply = server.http.get("/metrics", params={"name[]": names})
    assert set(families(reply.text)) == {name.removesuffix("_total") for name in names[:3]}
    assert reply.headers["content-type"].startswith("text/plain")


def test_an_engine_that_serves_is_no_longer_starting(server: Server) -> None:
    reply = server.get("/metrics")
    assert re.search(r"^srm_engine_starting_since_seconds 0\.0$", reply.text, re.MULTILINE)


def test_paths_and_methods_of_callers_make_no_series(server: Server) -> None:
    server.get("/metrics")
    before = len(server.get("/metrics").text.splitlines())
    for i in range(20):
        assert server.get(f"/scan/{i}.php?x={i}").status_code == 404
        assert server.http.request("PROPFIND", f"/{i}").status_code == 404
        assert server.get(f"/v1/completions/../../{i}").status_code == 404
        assert server.get(f"/v1/models/none-{i}").status_code == 404
        assert server.get(f"/dashboard/none-{i}").status_code == 404
    text = server.get("/metrics").text
    handlers = set(re.findall(r'handler="([^"]*)"', text))
    assert {"other", "/v1/models/{name:path}", "/dashboard/{name}", "/metrics"} <= handlers
    assert not [
        handler for handler in handlers if re.search(r"\d|scan|none", handler.replace("/v1", ""))
    ]
    methods = set(re.findall(r'method="([^"]*)"', text))
    assert methods <= {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "other"}
    # A series of requests for each status, and one histogram for each handler and method.
    assert len(text.splitlines()) - before <= 5 * (1 + 20)


COUNTING = """
import sys
from srm.server import metrics
metrics.HTTP_REQUESTS.labels('/', 'GET', '200').inc(3)
metrics.HTTP_IN_FLIGHT.inc()
metrics.TIME_TO_FIRST_TOKEN.observe(0.3)
print("counted", flush=True)
sys.stdin.read()
"""


@contextmanager
def counting(region: Region) -> Iterator[None]:
    """A process that has counted, and is killed afterwards."""
    process = subprocess.Popen(
        [sys.executable, "-c", COUNTING],
        cwd=ROOT,
        env={**os.environ, **region.environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=[region.fd],
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"counted\n"
        yield
        process.kill()
    region.forget_gauges()


def test_processes_add_up_and_those_after_the_dead_count_on() -> None:
    """Each crash left two or three files, which were never merged or removed."""

    def requests_and_gauge() -> tuple[float, list[float]]:
        entries = {family.name: family for family in scrape.merged(regions[0])}
        total = value(entries, "http_requests", "http_requests_total", handler="/")
        bucket = "srm_time_to_first_token_seconds_bucket"
        assert value(entries, "srm_time_to_first_token_seconds", bucket, le="0.25") == 0
        assert value(entries, "srm_time_to_first_token_seconds", bucket, le="0.5") == total / 3
        in_flight = entries.get("http_requests_in_flight")
        return total, [sample.value for sample in in_flight.samples] if in_flight else []

    regions = create(["", ""])
    try:
        with counting(regions[0]):
            assert requests_and_gauge() == (3, [1])
            with counting(regions[1]):
                assert requests_and_gauge() == (6, [2])
            assert requests_and_gauge() == (6, [1])
            for crashes in range(1, 6):
                with counting(regions[1]):
                    assert requests_and_gauge() == (6 + 3 * crashes, [2])
        assert requests_and_gauge() == (21, [])
        assert os.fstat(regions[0].fd).st_size == 2 * (COUNTS_BYTES + GAUGES_BYTES)
    finally:
        os.close(regions[0].fd)


async def test_many_who_ask_at_once_cost_two_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    threads, may_go_on = set(), threading.Event()

    def read() -> list[Metric]:
        threads.add(threading.current_thread())
        reads.append(len(reads))
        may_go_on.wait()
        return [Metric(f"read_{reads[-1]}", "", "gauge")]

    monkeypatch.setattr(scrape, "read_families", read)
    one = scrape.Scrape(lambda: None)
    first = asyncio.create_task(one.families())
    while not reads:
        await asyncio.sleep(0.001)
    others = [asyncio.create_task(one.families()) for _ in range(50)]
    await asyncio.sleep(0)
    others.pop().cancel()  # a client that leaves takes nobody along
    may_go_on.set()
    assert [family.name for family in await first] == ["read_0"]
    result = await asyncio.gather(*others)
    assert {family.name for families_ in result for family in families_} == {"read_1"}
    assert len(reads) == 2
    assert threading.current_thread() not in threads


async def test_a_failed_read_fails_who_shared_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> list[Metric]:
        raise OSError("no file")

    one = scrape.Scrape(lambda: None)
    with monkeypatch.context() as patched:
        patched.setattr(scrape, "read_families", fail)
        result = await asyncio.gather(*(one.families() for _ in range(3)), return_exceptions=True)
        assert all(isinstance(error, OSError) for error in result)
    assert {family.name for family in await one.families()} >= {"srm_engine_steps"}


def test_the_page_is_served_and_nothing_else_of_the_file_system(server: Server) -> None:
    page = server.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    files = re.findall(r'(?:href|src)="(dashboard/[^"]+)"', page.text)
    assert set(files) == {"dashboard/icon.svg", "dashboard/style.css", "dashboard/app.js"}
    for name in files:
        reply = server.get(f"/{name}")
        assert reply.status_code == 200
        assert "default-src 'none'" in reply.headers["content-security-policy"]
        assert "unsafe" not in reply.headers["content-security-policy"]
        assert reply.headers["x-content-type-options"] == "nosniff"
    for path in ("../app.py", "..%2fapp.py", "%2e%2e/app.py", "/etc/passwd", "app.py", "x" * 2_000):
        reply = server.http.get(httpx.URL(f"{server.url}/dashboard/{path}"))
        assert error_of(reply, 404)["type"] == "not_found_error"
