"""`srm bench http`: the same requests through HTTP and through the engine alone.

Starts `srm serve` as a user would, sends bursts of requests, and compares the tokens a second with
those of the engine in a process of its own: streams of one completion each, and few requests of
many. Engine, server and client share this machine, so the client's own work is in the figures.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import msgspec

from bench.frame import Record, Settings, run, table
from bench.host.serving import serving
from bench.server.load import burst
from engine.config import DEMO_MODEL, EngineConfig
from engine.device.runner import ModelRunner
from engine.messages import SamplingParams
from engine.process.engine import Engine
from engine.records import ROOT
from engine.weights.checkpoint import load_checkpoint


class HttpBenchConfig(Settings, frozen=True, forbid_unknown_fields=True):
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


def main(argv: list[str]) -> int:
    """Measure, write a record, print its table."""
    return run(HttpBenchConfig, argv, "http", measure, markdown, stem="http-{0.model.name}")


def measure(config: HttpBenchConfig) -> Record:
    """Return the rates of each burst, by the engine alone and through HTTP."""
    bursts = [(count, 1, (True,)) for count in config.streams]
    kinds = [*bursts, (config.requests, config.n, (True, False))]
    engine = {(requests, n): _ask_engine(config, requests, n) for requests, n, _ in kinds}
    flags = (f"--model={config.model}", f"--api-processes={config.api_processes}")
    with serving(*flags) as server:
        cases = [
            {
                "requests": requests,
                "n": n,
                "is_stream": is_stream,
                "engine_tokens_per_s": engine[requests, n],
                "http_tokens_per_s": _http_rates(server.url, config, requests, n, is_stream),
            }
            for requests, n, streamed in kinds
            for is_stream in streamed
        ]
    return {"model": config.model.name, "cases": cases}


def _ask_engine(config: HttpBenchConfig, requests: int, n: int) -> list[float]:
    """Return the engine's rates, from a process of its own."""
    burst = msgspec.structs.replace(config, requests=requests, n=n)
    task = msgspec.json.encode(burst, enc_hook=str).decode()
    command = [sys.executable, "-m", "bench.server.http", task]
    output = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
    return msgspec.json.decode(output, type=list[float])


def engine_rates(config: HttpBenchConfig) -> list[float]:
    """Measure the engine's tokens a second in each repetition, after a small burst to warm up."""
    weights, settings = load_checkpoint(config.model), EngineConfig()
    engine = Engine(weights.config, ModelRunner(weights, settings), settings)
    prompts = [[2 + i] for i in range(config.requests)]
    params = SamplingParams(n=config.n, max_tokens=config.max_tokens, ignore_eos=True)
    engine.generate(prompts, msgspec.structs.replace(params, max_tokens=2))
    rates = []
    for repetition in range(config.repetitions):
        started = time.perf_counter()
        outputs = engine.generate(prompts, msgspec.structs.replace(params, seed=repetition))
        seconds = time.perf_counter() - started
        rates.append(sum(len(o.token_ids) // 4 for samples in outputs for o in samples) / seconds)
    return rates


def _http_rates(
    url: str, config: HttpBenchConfig, requests: int, n: int, is_stream: bool
) -> list[float]:
    """Return the tokens a second of each burst, from its first byte to the last reply's end."""
    sizes = {"requests": requests, "n": n, "stream": is_stream}
    burst(url, max_tokens=2, **sizes)
    rates = []
    for seed in range(config.repetitions):
        found = burst(url, max_tokens=config.max_tokens, seed=seed, **sizes).requests
        seconds = float(found["ended"].max() - found["sent"].min())
        rates.append(int(found["usage_output_tokens"].sum()) / seconds)
    return rates


def markdown(record: Record) -> list[str]:
    """Render the record as a table."""
    rows = []
    for case in record["cases"]:
        engine, http = median(case["engine_tokens_per_s"]), median(case["http_tokens_per_s"])
        kind = "stream" if case["is_stream"] else "whole"
        size = f"{case['requests']:,} × {case['n']:,}"
        rows.append(f"{size} | {kind} | {engine:,.0f} | {http:,.0f} | {http / engine:.1%}")
    tokens = record["settings"]["max_tokens"]
    return [
        f"Tokens a second, {tokens} tokens a completion; the ratio is that of the medians. The "
        "client is that of `srm loadtest`, which reads every event.",
        "",
        *table("requests × n | reply | engine tok/s | HTTP tok/s | ratio", rows),
    ]


if __name__ == "__main__":
    asked = msgspec.json.decode(sys.argv[1], type=HttpBenchConfig, dec_hook=lambda kind, x: kind(x))
    sys.stdout.write(msgspec.json.encode(engine_rates(asked)).decode())
