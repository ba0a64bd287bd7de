"""`srm bench text`: the rate at which an API process handles tokens when the engine costs nothing.

Starts `srm serve` with an engine whose steps are done when they begin, and sends bursts: many
streams of one completion, and few requests of many, streamed, whole, and watched for a stop string.
Measures tokens per second of wall time, and per second of the API processes' processor time, which
other processes of this machine affect less. Records go to docs/benchmarks/.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from bench.server.bursts import PLAIN, Burst, BurstSizes
from bench.server.served import Served, served
from engine.config import DEMO_MODEL
from engine.records import RECORDS, new_record, settings_of, write_record
from engine.settings import load

_NEVER = "\N{SNOWMAN}\N{SNOWMAN}"
"""A stop string that occurs in no text."""


class TextBenchConfig(BurstSizes, frozen=True, forbid_unknown_fields=True):
    """Settings of `srm bench text`."""

    model: Path = DEMO_MODEL
    """Folder with config.json and tokenizer.json; there need be no weights."""
    api_processes: int = 1
    """Processes that answer."""
    output: Path = RECORDS
    """Folder that the record is written to."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.api_processes < 1:
            raise ValueError(f"api_processes must be at least 1, got {self.api_processes}")


_BURSTS = (
    *PLAIN,
    Burst("whole of many, a stop string", False, True, {"stop": _NEVER}),
    Burst("whole of many, token ids", False, True, {"return_token_ids": True}),
)


def main(argv: list[str]) -> int:
    """Measure, write a record, print its table."""
    config = load(TextBenchConfig, argv, prog="srm bench text")
    flags = (
        f"--model={config.model}",
        f"--api-processes={config.api_processes}",
        "--max-step-rows=16384",  # a step of an instant engine costs by the step
        "--max-step-tokens=32768",
    )
    with served("bench.host.instant", *flags) as server:
        cases = [_measure(server, config, burst) for burst in _BURSTS]
    record = new_record(" ".join(["srm bench text", *argv])) | {
        "settings": settings_of(config),
        "cases": cases,
    }
    write_record(record, "text", markdown(record), config.output)
    return 0


def _measure(server: Served, config: TextBenchConfig, burst: Burst) -> dict[str, Any]:
    server.send(list(burst.bodies(config, 2)))
    bodies = list(burst.bodies(config, config.max_tokens))
    raw = []
    for _ in range(config.repetitions):
        before = server.api_seconds()
        result = server.send(bodies)
        busy = server.api_seconds() - before
        raw.append(
            {
                "tokens_per_s": result.tokens / result.seconds,
                "tokens_per_api_s": result.tokens / busy if busy else None,
                "tokens": result.tokens,
                "bytes": result.num_bytes,
                "events": result.events,
            }
        )
    requests, n = burst.shape(config)
    return {"name": burst.name, "requests": requests, "n": n, "raw": raw}


def markdown(record: dict[str, Any]) -> str:
    """Render the record as a table."""
    settings = record["settings"]
    lines = [
        f"Tokens a second with an engine whose steps cost nothing, {settings['max_tokens']} tokens "
        f"a completion, {settings['api_processes']} API process(es).",
        "",
        "| burst | requests × n | tok/s | tok/s of API processor time | tokens an event |",
        "|---|---|---|---|---|",
    ]
    for case in record["cases"]:
        raw = case["raw"]
        rates = [one["tokens_per_api_s"] for one in raw if one["tokens_per_api_s"]]
        events = [one["tokens"] / one["events"] for one in raw if one["events"]]
        lines.append(
            f"| {case['name']} | {case['requests']:,} × {case['n']:,} "
            f"| {median(one['tokens_per_s'] for one in raw):,.0f} "
            f"| {f'{median(rates):,.0f}' if rates else ''} "
            f"| {f'{median(events):,.1f}' if events else ''} |"
        )
    return "\n".join(lines) + "\n"
