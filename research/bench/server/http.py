"""`srm bench http`: the same requests through HTTP and through the engine alone.

Starts `srm serve` as a user would, sends bursts of requests, and compares the tokens a second with
those of the engine in a process of its own: streams of one completion each, and few requests of
many. Engine, server and client share this machine, so the client's own work is in the figures. With
`hostile`, each burst takes turns with two more: one beside so many other requests, and one beside
as many whose constraints take all that they may.
"""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from statistics import median
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec
import numpy as np

from research.bench.frame import Record, Settings, random_shape, run, table
from research.bench.host.serving import serving
from research.bench.server.load import send
from srm.engine.config import DEMO_MODEL, EngineConfig
from srm.engine.device.runner import make_runner
from srm.engine.messages import SamplingParams
from srm.engine.process.engine import Engine
from srm.engine.weights.checkpoint import load_checkpoint
from srm.engine.weights.random_model import write_random_model
from srm.errors import ConfigError
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
    hostile: int = 0
    """Requests with hostile constraints that are sent at once beside a burst, and as many with
    harmless ones beside another."""

    @property
    def kind(self) -> str:
        """Name of the record: which models are measured."""
        models = "random" if self.random_widths else self.model.name
        return f"{models}-hostile" if self.hostile else models


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
    numbers = itertools.count()  # the server remembers the constraints of all cases
    with serving(*flags, "--prefix-cache=false") as server:
        for requests, n, streamed in bursts:
            for is_stream in streamed:
                bursts_of, answers = _bursts(
                    server.url, config, numbers, requests=requests, n=n, stream=is_stream
                )
                measured = bursts_of["http"]
                yield {
                    "model": model.name,
                    "dtype": dtype,
                    "requests": requests,
                    "n": n,
                    "is_stream": is_stream,
                    "engine_tokens_per_s": engine[requests, n],
                    **{
                        f"{kind}_tokens_per_s": [rate_of(burst) for burst in recordings]
                        for kind, recordings in bursts_of.items()
                    },
                    "hostile_answers": answers,
                    "ttft_s": [_ttft(burst) for burst in measured] if is_stream else [],
                }


def _ask_engine(burst: _Burst) -> list[float]:
    """Return the engine's rates, from a process of its own."""
    task = msgspec.json.encode(burst, enc_hook=str).decode()
    command = [sys.executable, "-m", "research.bench.server.http", task]
    output = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
    return msgspec.json.decode(output, type=list[float])


def engine_rates(burst: _Burst) -> list[float]:
    """Measure the engine's tokens a second in each repetition, after a small burst to warm up."""
    weights = load_checkpoint(burst.model)
    settings = EngineConfig(dtype=burst.dtype, prefix_cache=False)
    engine = Engine(weights.config, make_runner(weights, settings), settings)
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
    url: str, config: HttpBenchConfig, numbers: Iterator[int], requests: int, n: int, stream: bool
) -> tuple[dict[str, list[Recording]], dict[int, int]]:
    """Send a small burst to warm up, then the repetitions, and where there are hostile requests
    each with other prompts beside harmless and beside hostile ones: return all by kind, and how
    many hostile ones were answered, by status."""
    sizes: dict[str, Any] = {"requests": requests, "concurrency": requests, "n": str(n)}
    sizes |= {"prompt_tokens": str(config.prompt_tokens), "stream": stream}
    send(url, output_tokens="2", seed=config.repetitions, **sizes)
    sizes["output_tokens"] = str(config.max_tokens)
    answers = Counter[int]()
    kinds = ("http", "harmless", "hostile") if config.hostile > 0 else ("http",)
    measured: dict[str, list[Recording]] = {kind: [] for kind in ("http", "harmless", "hostile")}
    for i in range(config.repetitions):
        for kind in kinds[i % len(kinds) :] + kinds[: i % len(kinds)]:
            seed = i + kinds.index(kind) * (config.repetitions + 1)
            with _requests_beside(url, kind, config.hostile, numbers, answers):
                measured[kind].append(send(url, seed=seed, **sizes))
    return measured, dict(answers)


@contextmanager
def _requests_beside(
    url: str, kind: str, num_requests: int, numbers: Iterator[int], answers: Counter[int]
) -> Iterator[None]:
    """Send so many of a kind at once, go on once one has ended, give up those that are not answered
    at the end, and wait until one with a new constraint is: then what they left is over. `http` is
    none at all.

    Raises ConfigError for an answer that is neither a completion nor a refusal, and for none.
    """
    if kind == "http":
        yield
        return
    has_begun, is_over = threading.Event(), threading.Event()
    address = urlsplit(url)

    async def ask(constraint: dict[str, Any]) -> int:  # httpx takes seconds for 1,000 connections
        body = msgspec.json.encode(
            {"prompt": "a", "max_tokens": 1, "structured_outputs": constraint}
        )
        try:
            reader, writer = await asyncio.open_connection(address.hostname, address.port)
            with closing(writer):
                writer.write(
                    b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n"
                    b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
                    % (len(body), body)
                )
                if not (line := await reader.readline()):
                    raise ConfigError(f"{url}: a constraint was not answered")
                if (status := int(line.split()[1])) not in (200, 400, 503):
                    raise ConfigError(f"{url}: a constraint was answered with {status}")
                return status
        except OSError as error:
            raise ConfigError(f"{url}: a constraint was not answered: {error}") from None
        finally:
            has_begun.set()

    async def ask_all() -> None:
        constraints: list[dict[str, Any]] = [{"choice": ["yes", "no"]}] * num_requests
        if kind == "hostile":
            constraints = [hostile_constraint(next(numbers)) for _ in range(num_requests)]
        tasks = [asyncio.ensure_future(ask(constraint)) for constraint in constraints]
        await asyncio.to_thread(is_over.wait)
        for task in tasks:
            task.cancel()
        for answer in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(answer, Exception):
                raise answer
            if isinstance(answer, int) and kind == "hostile":  # it was not given up
                answers[answer] += 1
        while await ask({"choice": [f"{next(numbers)}"]}) == 503:
            await asyncio.sleep(0.1)

    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(asyncio.run, ask_all())
        asked.add_done_callback(lambda _: has_begun.set())  # failed
        try:
            has_begun.wait()
            yield
        finally:
            is_over.set()
        asked.result()


def hostile_constraint(number: int) -> dict[str, Any]:
    """Return `structured_outputs` that take all time or memory there is, one for each number."""
    branches = {
        f"{i}": {"oneOf": [{"$ref": f"#/$defs/{i + 1}"}] * 2, "title": f"{number}"}
        for i in range(40)
    }
    kinds: list[dict[str, Any]] = [
        {"regex": f"{number}((a{{1,1000}}){{1,1000}}){{1,1000}}"},
        {"regex": f"{number}(0|1)*1(0|1){{30}}"},
        {"regex": f"{number}(?:a?){{600}}a{{600}}"},
        {"json": {"enum": list(range(number, number + 9_999))}},
        {"json": {"$defs": {**branches, "40": {"type": "integer"}}, "$ref": "#/$defs/0"}},
        {"json": '{"items":' * 10_000 + f"{number}" + "}" * 10_000},
        {"json": {"type": "string", "pattern": f"{number}(a|b)*a(a|b){{20}}", "maxLength": 900}},
    ]
    return kinds[number % len(kinds)]


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
            f"{_beside(case, 'harmless', 'http')} | {_beside(case, 'hostile', 'harmless')} | "
            + " / ".join(f"{seconds:.2f} s" for seconds in ttft)
        )
    return [
        f"Tokens a second, prompts of {settings['prompt_tokens']} tokens, completions of "
        f"{settings['max_tokens']}; medians of {settings['repetitions']}, and the ratio of these. "
        "The client is that of `srm loadtest`, which reads every event.",
        "",
        *table(
            "model | requests × n | reply | engine, tok/s | HTTP | part | beside harmless requests"
            ", of HTTP alone | beside hostile ones, of harmless | TTFT p50 / p99",
            rows,
        ),
    ]


def _beside(case: Record, kind: str, other: str) -> str:
    """Show the median of the ratios of two kinds of bursts, of those sent in one repetition."""
    rates = (case[f"{name}_tokens_per_s"] for name in (kind, other))
    ratios = [beside / alone for beside, alone in zip(*rates, strict=False)]
    return f"{median(ratios):.3f}" if ratios else "–"


if __name__ == "__main__":
    asked = msgspec.json.decode(sys.argv[1], type=_Burst, dec_hook=lambda kind, x: kind(x))
    sys.stdout.write(msgspec.json.encode(engine_rates(asked)).decode())
