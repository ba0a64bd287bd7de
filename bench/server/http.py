"""`srm bench http`: the same requests through HTTP and through the engine alone.

Starts `srm serve` as a user would, sends bursts of requests, and compares the tokens a second with
those of the engine in process: streams of one completion each, and few requests of many. Engine,
server and client share this machine, so the client's own work is in the figures. Records go to
docs/benchmarks/.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from bench.server.served import Served, completion, served
from engine.config import DEMO_MODEL
from engine.records import RECORDS, ROOT, new_record, settings_of, write_record
from engine.settings import load


class HttpBenchConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of `srm bench http`."""

    model: Path = DEMO_MODEL
    """Folder with config.json, model.safetensors and tokenizer.json."""
    streams: tuple[int, ...] = (1, 64, 1_024)
    """Streams of one completion each that are read at once."""
    requests: int = 10
    """Requests for many completions, sent at once, streamed and whole."""
    n: int = 1_000
    """Completions of each of these."""
    max_tokens: int = 64
    """Tokens of each completion."""
    api_processes: int = 1
    """Processes that answer."""
    repetitions: int = 3
    """Bursts, through HTTP and through the engine alone; the medians are compared."""
    output: Path = RECORDS
    """Folder that the record is written to."""

    def __post_init__(self) -> None:
        for name in ("requests", "n", "max_tokens", "api_processes", "repetitions"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if any(count < 1 for count in self.streams):
            raise ValueError(f"streams must be numbers of at least 1, got {self.streams}")


def main(argv: list[str]) -> int:
    """Measure, write a record, print its table."""
    config = load(HttpBenchConfig, argv, prog="srm bench http")
    bursts: list[tuple[int, int, tuple[bool, ...]]] = [
        (count, 1, (True,)) for count in config.streams
    ]
    bursts.append((config.requests, config.n, (True, False)))
    engine = {(requests, n): _engine_rates(config, requests, n) for requests, n, _ in bursts}
    flags = (f"--model={config.model}", f"--api-processes={config.api_processes}")
    with served("engine", *flags) as server:
        cases = [
            {
                "requests": requests,
                "n": n,
                "is_stream": is_stream,
                "engine_tokens_per_s": engine[requests, n],
                **_http_rates(server, config, requests, n, is_stream),
            }
            for requests, n, kinds in bursts
            for is_stream in kinds
        ]
    record = new_record(" ".join(["srm bench http", *argv])) | {
        "model": config.model.name,
        "settings": settings_of(config),
        "cases": cases,
    }
    write_record(record, f"http-{config.model.name}", markdown(record), config.output)
    return 0


def _engine_rates(config: HttpBenchConfig, requests: int, n: int) -> list[float]:
    burst = {
        "model": config.model,
        "requests": requests,
        "n": n,
        "max_tokens": config.max_tokens,
        "repetitions": config.repetitions,
    }
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in burst.items()]
    output = subprocess.run(
        [sys.executable, "-m", "bench.host.burst", *flags],
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
    ).stdout
    return msgspec.json.decode(output, type=list[float])


def _http_rates(
    server: Served, config: HttpBenchConfig, requests: int, n: int, is_stream: bool
) -> dict[str, list[float]]:
    def burst(max_tokens: int, seed: int) -> list[dict[str, Any]]:
        return [
            completion(2 + index % 64, n, max_tokens, seed + index, is_stream)
            for index in range(requests)
        ]

    server.send(burst(2, 0))
    results = [server.send(burst(config.max_tokens, seed)) for seed in range(config.repetitions)]
    return {
        "http_tokens_per_s": [result.tokens / result.seconds for result in results],
        "tokens_per_event": [result.tokens / max(result.events, 1) for result in results],
    }


def markdown(record: dict[str, Any]) -> str:
    """Render the record as a table."""
    tokens = record["settings"]["max_tokens"]
    lines = [
        f"Tokens a second, {tokens} tokens a completion; the ratio is that of the medians.",
        "",
        "| requests × n | reply | engine tok/s | HTTP tok/s | ratio | tokens an event |",
        "|---|---|---|---|---|---|",
    ]
    for case in record["cases"]:
        engine, http = median(case["engine_tokens_per_s"]), median(case["http_tokens_per_s"])
        kind = "stream" if case["is_stream"] else "whole"
        events = f"{median(case['tokens_per_event']):,.1f}" if case["is_stream"] else ""
        lines.append(
            f"| {case['requests']:,} × {case['n']:,} | {kind} | {engine:,.0f} | {http:,.0f} "
            f"| {http / engine:.1%} | {events} |"
        )
    return "\n".join(lines) + "\n"
