"""`srm bench http`: the same requests through HTTP and through the engine alone.

Starts `srm serve` as a user would, sends bursts of requests, and compares the tokens a second with
those of the engine in a process of its own: streams of one completion each, and few requests of
many. Engine, server and client share this machine, so the client's own work is in the figures.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, Literal

import msgspec
import numpy as np

from bench.engine.models import random_shape
from bench.frame import Record, Settings, run, table
from bench.host.serving import serving
from bench.server.load import send
from srm.engine.config import DEMO_MODEL, EngineConfig
from srm.engine.device.runner import ModelRunner
from srm.engine.messages import SamplingParams
from srm.engine.process.engine import Engine
from srm.engine.weights.checkpoint import load_checkpoint
from srm.engine.weights.random_model import write_random_model
from srm.loadtest.analysis.chunks import chunks
from srm.loadtest.analysis.measures import first_tokens
from srm.loadtest.recording import Recording
from srm.loadtest.records import ROOT


class HttpBenchConfig(Settings, frozen=True, forbid_unknown_fields=True):
    """Settings of `srm bench http`."""

    model: Path = DEMO_MODEL
    """Folder with config.json, model.safetensors and tokenizer.json."""
    random_widths: tuple[int, ...] = ()
    """Values of d_model of models with random weights, to measure instead of `model`."""
    dtypes: tuple[Literal["float32", "bfloat16"], ...] = ("float32",)
    """Dtypes of matrices and activations; each is measured."""
    streams: tuple[int, ...] = (1, 64, 256, 1_024)
    """Numbers of streams read at once, of one completion each."""
    requests: int = 10
    """Number of requests for many completions, sent at once, streamed and whole."""
    n: int = 1_000
    """Completions of each of these requests; 0: they are left out."""
    prompt_tokens: int = 32
    """Tokens of each prompt."""
    max_tokens: int = 128
    """Tokens of each completion."""
    api_processes: int = 1
    """Number of API processes."""
    repetitions: int = 3
    """Bursts through HTTP and through the engine alone; the medians are compared."""

    @property
    def kind(self) -> str:
        """Name of the record: which models are measured."""
        return "random" if self.random_widths else self.model.name


class _Burst(msgspec.Struct, frozen=True):
    """The measurement that a process with the engine alone is asked for."""

    model: Path
    dtype: Literal["float32", "bfloat16"]
    requests: int
    n: int
    prompt_tokens: int
    max_tokens: int
    repetitions: int


def main(argv: list[str]) -> int:
    """Measure, write a record, print its table."""
    return run(HttpBenchConfig, argv, "http", measure, markdown, stem="http-{0.kind}")


def measure(config: HttpBenchConfig) -> Record:
    """Return the rates of each burst, by the engine alone and through HTTP."""
    with tempfile.TemporaryDirectory() as folder:
        return {
            "cases": [
                case
                for model in _models(config, Path(folder))
                for dtype in config.dtypes
                for case in _cases(config, model, dtype)
            ]
        }


def _models(config: HttpBenchConfig, folder: Path) -> Iterator[Path]:
    if not config.random_widths:
        yield config.model
    for width in config.random_widths:
        write_random_model(folder / f"srm-{width}", random_shape(width))
        yield folder / f"srm-{width}"


def _cases(
    config: HttpBenchConfig, model: Path, dtype: Literal["float32", "bfloat16"]
) -> Iterator[Record]:
    bursts: list[tuple[int, int, tuple[bool, ...]]]
    bursts = [(count, 1, (True,)) for count in config.streams]
    if config.n:
        bursts.append((config.requests, config.n, (True, False)))
    sizes = (config.prompt_tokens, config.max_tokens, config.repetitions)
    engine = {
        (requests, n): _ask_engine(_Burst(model, dtype, requests, n, *sizes))
        for requests, n, _ in bursts
    }
    flags = (f"--model={model}", f"--dtype={dtype}", f"--api-processes={config.api_processes}")
    with serving(*flags) as server:
        for requests, n, streamed in bursts:
            for is_stream in streamed:
                measured = _bursts(server.url, config, requests=requests, n=n, stream=is_stream)
                yield {
                    "model": model.name,
                    "dtype": dtype,
                    "requests": requests,
                    "n": n,
                    "is_stream": is_stream,
                    "engine_tokens_per_s": engine[requests, n],
                    "http_tokens_per_s": [rate_of(burst) for burst in measured],
                    "ttft_s": [_ttft(burst) for burst in measured] if is_stream else [],
                }


def _ask_engine(burst: _Burst) -> list[float]:
    """Return the engine's rates, from a process of its own."""
    task = msgspec.json.encode(burst, enc_hook=str).decode()
    command = [sys.executable, "-m", "bench.server.http", task]
    output = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
    return msgspec.json.decode(output, type=list[float])


def engine_rates(burst: _Burst) -> list[float]:
    """Measure the engine's tokens a second in each repetition, after a small burst to warm up."""
    weights, settings = load_checkpoint(burst.model), EngineConfig(dtype=burst.dtype)
    engine = Engine(weights.config, ModelRunner(weights, settings), settings)
    shape = (1 + burst.repetitions, burst.requests, burst.prompt_tokens)
    prompts = np.random.default_rng(0).integers(2, weights.config.vocab_size, shape).tolist()
    params = SamplingParams(n=burst.n, max_tokens=burst.max_tokens, ignore_eos=True)
    engine.generate(prompts[0], msgspec.structs.replace(params, max_tokens=2))
    rates = []
    for repetition in range(burst.repetitions):
        seeded = msgspec.structs.replace(params, seed=repetition)
        started = time.perf_counter()
        outputs = engine.generate(prompts[1 + repetition], seeded)
        seconds = time.perf_counter() - started
        rates.append(sum(len(o.token_ids) // 4 for samples in outputs for o in samples) / seconds)
    return rates


def _bursts(
    url: str, config: HttpBenchConfig, requests: int, n: int, stream: bool
) -> list[Recording]:
    """Send a small burst to warm up, then the repetitions."""
    sizes: dict[str, Any] = {"requests": requests, "concurrency": requests, "n": str(n)}
    sizes |= {"prompt_tokens": str(config.prompt_tokens), "stream": stream}
    send(url, output_tokens="2", seed=config.repetitions, **sizes)
    tokens = str(config.max_tokens)
    return [send(url, output_tokens=tokens, seed=i, **sizes) for i in range(config.repetitions)]


def rate_of(*recordings: Recording) -> float:
    """Return the tokens a second of all, from the first byte sent to the last reply's end."""
    results = [(recording.about.started_unix, recording.requests) for recording in recordings]
    began = min(start + float(requests["sent"].min()) for start, requests in results)
    ended = max(start + float(requests["ended"].max()) for start, requests in results)
    tokens = sum(int(requests["usage_output_tokens"].sum()) for _, requests in results)
    return tokens / (ended - began)


def _ttft(recording: Recording) -> dict[str, float]:
    """Return percentiles of the seconds from a request's first byte to its first token."""
    seconds = first_tokens(recording.requests, chunks(recording)) - recording.requests["sent"]
    return {f"p{percent}": float(np.percentile(seconds, percent)) for percent in (50, 99)}


def markdown(record: Record) -> list[str]:
    """Render the record as a table."""
    settings, rows = record["settings"], []
    for case in record["cases"]:
        engine, http = median(case["engine_tokens_per_s"]), median(case["http_tokens_per_s"])
        kind = "stream" if case["is_stream"] else "whole"
        size = f"{case['requests']:,} × {case['n']:,}"
        ttft = [
            median(seconds[name] for seconds in case["ttft_s"])
            for name in ("p50", "p99")
            if kind == "stream"
        ]
        rows.append(
            f"{case['model']}, {case['dtype']} | {size} | {kind} "
            f"| {engine:,.0f} | {http:,.0f} | {http / engine:.0%} | "
            + " / ".join(f"{seconds:.2f} s" for seconds in ttft)
        )
    return [
        f"Tokens a second, prompts of {settings['prompt_tokens']} tokens, completions of "
        f"{settings['max_tokens']}; medians of {settings['repetitions']}, and the ratio of these. "
        "The client is that of `srm loadtest`, which reads every event.",
        "",
        *table(
            "model | requests × n | reply | engine, tok/s | HTTP | part | TTFT p50 / p99",
            rows,
        ),
    ]


if __name__ == "__main__":
    asked = msgspec.json.decode(sys.argv[1], type=_Burst, dec_hook=lambda kind, x: kind(x))
    sys.stdout.write(msgspec.json.encode(engine_rates(asked)).decode())
