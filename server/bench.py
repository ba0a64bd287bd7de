"""`srm bench http`: the same burst of requests through HTTP and through the engine alone.

Starts `srm serve` as a user would, sends `requests` requests with `n` samples each at once, and
sets the tokens a second beside those of the engine in process. Both run on this machine, one after
the other, so the client's own work is in the figure. Records go to docs/benchmarks/.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import msgspec

from engine.config import DEMO_MODEL, load
from engine.errors import ConfigError
from engine.records import RECORDS, ROOT, new_record, write_record


class HttpBenchConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of `srm bench http`."""

    model: Path = DEMO_MODEL
    """Folder with config.json, model.safetensors and tokenizer.json."""
    requests: int = 20
    """Requests sent at once."""
    n: int = 200
    """Completions of each."""
    max_tokens: int = 64
    """Tokens of each completion."""
    repetitions: int = 3
    """Bursts, through HTTP and through the engine alone; the medians are compared."""
    output: Path = RECORDS
    """Folder that the record is written to."""

    def __post_init__(self) -> None:
        for name in ("requests", "n", "max_tokens", "repetitions"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


def main(argv: list[str]) -> int:
    """Measure, write a record, print its summary."""
    config = load(HttpBenchConfig, argv, prog="srm bench http")
    engine = _engine_rates(config)
    with _served(config.model) as url:
        http = asyncio.run(_http_rates(url, config))
    ratio = median(http) / median(engine)
    record = new_record(" ".join(["srm bench http", *argv])) | {
        "model": config.model.name,
        "requests": config.requests,
        "n": config.n,
        "max_tokens": config.max_tokens,
        "engine_tokens_per_s": engine,
        "http_tokens_per_s": http,
        "http_over_engine": ratio,
    }
    table = (
        "| model | requests × n × tokens | engine tok/s | HTTP tok/s | ratio |\n"
        "|---|---|---|---|---|\n"
        f"| {config.model.name} | {config.requests} × {config.n} × {config.max_tokens} "
        f"| {median(engine):,.0f} | {median(http):,.0f} | {ratio:.1%} |\n"
    )
    write_record(record, f"http-{config.model.name}", table, config.output)
    return 0


def _engine_rates(config: HttpBenchConfig) -> list[float]:
    burst = ("model", "requests", "n", "max_tokens", "repetitions")
    flags = [f"--{name.replace('_', '-')}={getattr(config, name)}" for name in burst]
    output = subprocess.run(
        [sys.executable, "-m", "engine.bench.burst", *flags],
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
    ).stdout
    return msgspec.json.decode(output, type=list[float])


@contextmanager
def _served(model: Path) -> Iterator[str]:
    """The URL of a server that is ready, stopped afterwards."""
    command = [sys.executable, "-m", "server", "serve", f"--model={model}", "--port=0"]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if found := re.match(r"Serving \S+ on (\S+)", line):
                    yield found[1]
                    break
            else:
                raise ConfigError(f"`srm serve --model {model}` did not start")
        finally:
            process.terminate()


async def _http_rates(url: str, config: HttpBenchConfig) -> list[float]:
    rates = []
    async with httpx.AsyncClient(base_url=url, timeout=None) as client:
        await _burst(client, config, 2, seed=0)
        for repetition in range(config.repetitions):
            started = time.perf_counter()
            tokens = await _burst(client, config, config.max_tokens, repetition)
            rates.append(tokens / (time.perf_counter() - started))
    return rates


async def _burst(
    client: httpx.AsyncClient, config: HttpBenchConfig, max_tokens: int, seed: int
) -> int:
    """All requests at once; the completion tokens they were charged."""

    async def one(index: int) -> int:
        body: dict[str, Any] = {
            "prompt": [2 + index],
            "n": config.n,
            "max_tokens": max_tokens,
            "seed": seed + index,
            "ignore_eos": True,
        }
        reply = await client.post("/v1/completions", json=body)
        reply.raise_for_status()
        return int(reply.json()["usage"]["completion_tokens"])

    return sum(await asyncio.gather(*(one(index) for index in range(config.requests))))
