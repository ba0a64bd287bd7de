"""`srm bench background`: latency of streams while a batch takes all free capacity.

Starts `srm serve` and sends streams at fixed times, whether earlier ones have ended or not: first
alone, then beside a batch that has more lines than there are slots. Measures time to the first
token and to the last; the client shares the machine.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from bench.frame import Record, Settings, run, table
from bench.host.serving import Serving, serving
from bench.server.load import send
from engine.config import DEMO_MODEL
from engine.errors import ConfigError
from loadtest.analysis.chunks import chunks
from loadtest.analysis.measures import first_tokens
from loadtest.workload.batch_file import BatchClient, write_lines

_ROUTE = "/v1/completions"
_WARM_UP_S = 5.0
_SETTLE_S = 5.0
"""Seconds from the batch's first result until it is assumed to occupy all slots."""


class BackgroundBenchConfig(Settings, frozen=True, forbid_unknown_fields=True):
    """Settings of `srm bench background`."""

    model: Path = DEMO_MODEL
    """Folder with config.json, model.safetensors and tokenizer.json."""
    requests_per_s: float = 4.0
    """Streams that begin each second."""
    seconds: float = 30.0
    """How long they do, alone and beside the batch."""
    max_tokens: int = 32
    """Tokens of each stream."""
    batch_lines: int = 100_000
    """Lines of the batch, which is cancelled in the end."""
    batch_max_tokens: int = 128
    """Tokens of each line."""
    num_slots: int = 256
    """Sequences that run together."""


def main(argv: list[str]) -> int:
    """Measure, write a record, print its table."""
    return run(BackgroundBenchConfig, argv, "background", measure, markdown)


def measure(config: BackgroundBenchConfig) -> Record:
    """Return the times of streams alone and beside a batch, and the batch's rate."""
    line = {"max_tokens": config.batch_max_tokens, "ignore_eos": True}
    bodies = (line | {"prompt": f"{i} + {i % 97} ="} for i in range(config.batch_lines))
    with tempfile.TemporaryDirectory(prefix="srm-bench-") as folder:
        source = Path(folder) / "in.jsonl"
        write_lines(source, _ROUTE, bodies)
        flags = (f"--model={config.model}", f"--data-dir={folder}/data")
        slots = f"--num-slots={config.num_slots}"
        with serving(*flags, slots) as server, BatchClient(server.url) as client:
            _streams(server, config, _WARM_UP_S)
            alone = _streams(server, config, config.seconds)
            id = client.start(client.upload(source), _ROUTE)

            def now() -> dict[str, Any]:
                found: dict[str, Any] = httpx.get(f"{server.url}/v1/batches/{id}").json()
                return found

            while not (counts := now()["request_counts"])["completed"]:
                if counts["failed"]:
                    raise ConfigError("a line of the batch failed: has the model a tokenizer?")
                time.sleep(0.1)
            time.sleep(_SETTLE_S)
            before, at = now(), time.perf_counter()
            beside = _streams(server, config, config.seconds)
            after, seconds = now(), time.perf_counter() - at
            if after["status"] != "in_progress":
                raise ConfigError(f"batch_lines = {config.batch_lines}: too few, it is done")
            client.cancel(id)
            tokens = after["usage"]["output_tokens"] - before["usage"]["output_tokens"]
            client.wait(id, lambda _: None)
    with_batch = {"beside": "a batch", **beside, "batch_tokens_per_s": tokens / seconds}
    return {"cases": [{"beside": "nothing", **alone}, with_batch]}


def _streams(
    server: Serving, config: BackgroundBenchConfig, seconds: float
) -> dict[str, list[float]]:
    """Return the times to first and last token of each stream, in seconds since it was due."""
    count = max(1, round(seconds * config.requests_per_s))
    sizes: dict[str, Any] = {
        "requests": count,
        "prompt_tokens": "1",
        "output_tokens": str(config.max_tokens),
    }
    found = send(server.url, arrivals="constant", rate=config.requests_per_s, **sizes)
    due, ended = found.requests["planned"], found.requests["ended"]
    first = first_tokens(found.requests, chunks(found))
    return {"first_token_s": (first - due).tolist(), "last_token_s": (ended - due).tolist()}


def markdown(record: Record) -> list[str]:
    """Render the record as a table."""
    settings, rows = record["settings"], []
    for case in record["cases"]:
        firsts, lasts = (
            1000 * np.percentile(case[name], [50, 99]) for name in ("first_token_s", "last_token_s")
        )
        rate = case.get("batch_tokens_per_s")
        rows.append(
            f"{case['beside']} | {len(case['first_token_s'])} "
            f"| {firsts[0]:.1f} | {firsts[1]:.1f} | {lasts[0]:.1f} | {lasts[1]:.1f} "
            f"| {f'{rate:,.0f}' if rate else ''}"
        )
    return [
        f"{settings['requests_per_s']:g} streams a second of {settings['max_tokens']} tokens, "
        f"{settings['num_slots']} slots; the batch: {settings['batch_max_tokens']} tokens a line. "
        "Milliseconds from when a stream was due.",
        "",
        *table(
            "beside | streams | first token, p50 | p99 | last token, p50 | p99 | batch tok/s", rows
        ),
    ]
