"""`srm bench background`: latency of streams while a batch takes all free capacity.

Starts `srm serve` and sends streams at fixed times, whether earlier ones have ended or not: first
alone, then beside a batch that has more lines than there are slots. Measures time to the first
token and to the last; the client shares the machine. Records go to docs/benchmarks/.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import numpy as np
import uvloop

from bench.server.batches import BatchClient, write_lines
from bench.server.served import completion, served
from engine.config import DEMO_MODEL
from engine.errors import ConfigError
from engine.records import RECORDS, new_record, settings_of, write_record
from engine.settings import load

_WARM_UP_S = 5.0
_SETTLE_S = 5.0
"""Seconds from the batch's first result until it is assumed to occupy all slots."""


class BackgroundBenchConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
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
    output: Path = RECORDS
    """Folder that the record is written to."""

    def __post_init__(self) -> None:
        for name in ("requests_per_s", "seconds"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        for name in ("max_tokens", "batch_lines", "batch_max_tokens", "num_slots"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


def main(argv: list[str]) -> int:
    """Measure, write a record, print its table."""
    config = load(BackgroundBenchConfig, argv, prog="srm bench background")
    with tempfile.TemporaryDirectory(prefix="srm-bench-") as folder:
        source = Path(folder) / "in.jsonl"
        write_lines(source, config.batch_lines, config.batch_max_tokens)
        flags = (
            f"--model={config.model}",
            f"--data-dir={folder}/data",
            f"--num-slots={config.num_slots}",
        )
        with served("engine", *flags) as server, BatchClient(server.url) as client:
            _streams(server.url, config, _WARM_UP_S)
            cases = [{"beside": "nothing", **_streams(server.url, config, config.seconds)}]
            id = client.start(source)
            while not (counts := client.get(id)["request_counts"])["completed"]:
                if counts["failed"]:
                    raise ConfigError("a line of the batch failed: has the model a tokenizer?")
                time.sleep(0.1)
            time.sleep(_SETTLE_S)
            before, at = client.get(id), time.perf_counter()
            found = _streams(server.url, config, config.seconds)
            after, seconds = client.get(id), time.perf_counter() - at
            if after["status"] != "in_progress":
                raise ConfigError(f"batch_lines = {config.batch_lines}: too few, it is done")
            client.cancel(id)
            tokens = after["usage"]["output_tokens"] - before["usage"]["output_tokens"]
            cases.append({"beside": "a batch", **found, "batch_tokens_per_s": tokens / seconds})
            client.wait(id)
    record = new_record(" ".join(["srm bench background", *argv])) | {
        "settings": settings_of(config),
        "cases": cases,
    }
    write_record(record, "background", markdown(record), config.output)
    return 0


def _streams(url: str, config: BackgroundBenchConfig, seconds: float) -> dict[str, Any]:
    """Return the times to first and last token of each stream, in seconds."""
    at = urlsplit(url)
    assert at.hostname is not None and at.port is not None
    count = max(1, round(seconds * config.requests_per_s))
    times = uvloop.run(_send_all(at.hostname, at.port, config, count))
    return {"first_token_s": [first for first, _ in times], "last_token_s": [t for _, t in times]}


async def _send_all(
    host: str, port: int, config: BackgroundBenchConfig, count: int
) -> list[tuple[float, float]]:
    started = time.perf_counter()

    async def one(number: int) -> tuple[float, float]:
        due = started + number / config.requests_per_s
        await asyncio.sleep(due - time.perf_counter())
        body = completion(2 + number % 64, 1, config.max_tokens, number, is_stream=True)
        return await _send(host, port, msgspec.json.encode(body), due)

    return await asyncio.gather(*(one(number) for number in range(count)))


async def _send(host: str, port: int, body: bytes, due: float) -> tuple[float, float]:
    """Return seconds from the due time to the first and the last token. Raises ConfigError."""
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    )
    head = await reader.readline()
    if b" 200 " not in head:
        raise ConfigError(f"refused: {(head + await reader.read()).decode(errors='replace')}")
    first = last = 0.0
    while line := await reader.readline():
        if line.startswith(b"data: {") and b'"choices":[{' in line:
            last = time.perf_counter() - due
            first = first or last
    writer.close()
    return first, last


def markdown(record: dict[str, Any]) -> str:
    """Render the record as a table."""
    settings = record["settings"]
    lines = [
        f"{settings['requests_per_s']:g} streams a second of {settings['max_tokens']} tokens, "
        f"{settings['num_slots']} slots; the batch: {settings['batch_max_tokens']} tokens a line. "
        "Milliseconds from when a stream was due.",
        "",
        "| beside | streams | first token, p50 | p99 | last token, p50 | p99 | batch tok/s |",
        "|---|---|---|---|---|---|---|",
    ]
    for case in record["cases"]:
        firsts, lasts = (
            1000 * np.percentile(case[name], [50, 99]) for name in ("first_token_s", "last_token_s")
        )
        rate = case.get("batch_tokens_per_s")
        lines.append(
            f"| {case['beside']} | {len(case['first_token_s'])} "
            f"| {firsts[0]:.1f} | {firsts[1]:.1f} | {lasts[0]:.1f} | {lasts[1]:.1f} "
            f"| {f'{rate:,.0f}' if rate else ''} |"
        )
    return "\n".join(lines) + "\n"
