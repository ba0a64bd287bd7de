"""`python -m research.bench.ray serve`: two replicas of Ray Serve under load, one of which is
killed.

Counts what its clients saw: whole replies, errors by kind, streams that broke off. Nothing is asked
for again.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from typing import Any

import httpx
import psutil
import ray
from ray import serve

from deploy.ray.serve_app import application
from research.bench.ray.config import RayServeConfig
from research.bench.records.figures import ray_serve
from srm.engine.config import DEMO_MODEL
from srm.loadtest.records import new_record, settings_of, write_record
from srm.settings import load
from tests.kit.serving import free_port

PROMPT = "Question: Ava has 6 boxes with 7 pears each. How many pears is that in all?\nAnswer:"


def main(argv: list[str]) -> int:
    """Do it, write a record, print its table; exit code 1 unless replies and streams came whole."""
    config = load(RayServeConfig, argv, prog="python -m research.bench.ray serve")
    record = new_record(" ".join(["python -m research.bench.ray serve", *argv]))
    record["settings"] = settings_of(config)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=128 * 1024**2)
    try:
        port = free_port()
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        settings = {"model": str(DEMO_MODEL), "max_step_rows": 256}
        serve.run(application(settings, num_replicas=2, max_ongoing_requests=64), route_prefix="/")
        record |= asyncio.run(under_load(f"http://127.0.0.1:{port}", config))
    finally:
        serve.shutdown()
        ray.shutdown()
    write_record(record, "ray-serve", "\n".join(ray_serve(record)) + "\n", config.output)
    return 0 if {"replies: 200", "streams: whole"} <= set(record["cases"]) else 1


async def under_load(url: str, config: RayServeConfig) -> dict[str, Any]:
    """Return what the clients counted, and when there were two replicas again."""
    seen: Counter[str] = Counter()
    slowest = {"replies": 0.0, "streams": 0.0}
    ends = time.monotonic() + config.seconds
    # trust_env: a proxy of the environment is none of this
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as http:

        async def client(kind: str) -> None:
            while time.monotonic() < ends:
                started = time.monotonic()
                outcome = await (reply if kind == "replies" else stream)(http, config.max_tokens)
                seen[f"{kind}: {outcome}"] += 1
                slowest[kind] = max(slowest[kind], time.monotonic() - started)

        async with asyncio.TaskGroup() as group:
            for number in range(config.concurrency + config.streams):
                group.create_task(client("replies" if number < config.concurrency else "streams"))
            await asyncio.sleep(config.seconds / 3)
            before = set(replicas())
            os.kill(min(before), signal.SIGKILL)
            killed = time.monotonic()
            while len(set(replicas())) < len(before) or not set(replicas()) - before:
                await asyncio.sleep(0.1)
            process_s = time.monotonic() - killed
    return {"cases": dict(sorted(seen.items())), "slowest_s": slowest, "new_process_s": process_s}


def replicas() -> list[int]:
    """Return the process ids of the replicas."""
    processes = psutil.process_iter(["cmdline"])  # which is None of one that has just ended
    named = ((process.pid, " ".join(process.info["cmdline"] or [])) for process in processes)
    return [pid for pid, name in named if name.startswith("ray::ServeReplica:")]


async def reply(http: httpx.AsyncClient, max_tokens: int) -> str:
    """Ask for a whole reply and return how it ended."""
    try:
        response = await http.post("/v1/completions", json=body(max_tokens))
    except httpx.HTTPError as error:
        return type(error).__name__
    return f"{response.status_code}"


async def stream(http: httpx.AsyncClient, max_tokens: int) -> str:
    """Ask for a stream and return how it ended."""
    asked = body(max_tokens) | {"stream": True}
    last = ""
    try:
        async with http.stream("POST", "/v1/completions", json=asked) as response:
            if response.status_code != 200:
                return f"{response.status_code}"
            async for line in response.aiter_lines():
                last = line or last
    except httpx.HTTPError as error:
        return f"{type(error).__name__} in the middle"
    return "whole" if last == "data: [DONE]" else "ended without [DONE]"


def body(max_tokens: int) -> dict[str, Any]:
    return {"prompt": PROMPT, "max_tokens": max_tokens, "ignore_eos": True}
