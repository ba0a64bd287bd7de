"""`srm bench server`: the bursts of `srm bench text` against any running OpenAI-style server.

Measures tokens per second of wall time, and per second of the server processes' processor time if
they are on this machine. The figures include the server's engine, whatever it is. Records go to
docs/benchmarks/.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

from bench.server.bursts import PLAIN, Burst, BurstSizes
from bench.server.processes import processor_seconds
from bench.server.served import send
from engine.records import RECORDS, new_record, settings_of, write_record
from engine.settings import load


class ServerBenchConfig(BurstSizes, frozen=True, forbid_unknown_fields=True):
    """Settings of `srm bench server`."""

    url: str = "http://127.0.0.1:8000"
    """Where the server is; /v1/completions is below it."""
    served_model_name: str = ""
    """The model to ask for; must be given."""
    server_name: str = ""
    """Name and version of the server, for the record; must be given."""
    server_note: str = ""
    """How it was started and with what model, for the record."""
    server_pid: int = 0
    """Its first process, if processor time is to be told; 0: it is not."""
    output: Path = RECORDS
    """Folder that the record is written to."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("served_model_name", "server_name"):
            if not getattr(self, name):
                raise ValueError(f"{name} must be given")
        if self.server_pid < 0:
            raise ValueError(f"server_pid must be at least 0, got {self.server_pid}")
        if not re.fullmatch(r"http://[^/?#@]+:\d+/?", self.url):
            raise ValueError(f"url must be http://HOST:PORT, got {self.url!r}")


def main(argv: list[str]) -> int:
    """Measure, write a record, print its table."""
    config = load(ServerBenchConfig, argv, prog="srm bench server")
    record = new_record(f"srm bench server {shlex.join(argv)}") | {
        "settings": settings_of(config),
        "cases": [_measure(config, burst) for burst in PLAIN],
    }
    slug = "-".join(re.findall(r"[a-z0-9.]+", config.server_name.lower()))
    write_record(record, f"server-{slug}", markdown(record), config.output)
    return 0


def _measure(config: ServerBenchConfig, burst: Burst) -> dict[str, Any]:
    at = urlsplit(config.url)
    assert at.hostname is not None and at.port is not None
    model = {"model": config.served_model_name}
    send(at.hostname, at.port, [body | model for body in burst.bodies(config, 2)])
    raw = []
    for _ in range(config.repetitions):
        bodies = [body | model for body in burst.bodies(config, config.max_tokens)]
        before = _processor_seconds(config)
        result = send(at.hostname, at.port, bodies)
        raw.append(
            {
                "tokens": result.tokens,
                "seconds": result.seconds,
                "bytes": result.num_bytes,
                "events": result.events,
                "processor_s": {
                    name: seconds - before.get(name, 0)
                    for name, seconds in _processor_seconds(config).items()
                },
            }
        )
    requests, n = burst.shape(config)
    return {"name": burst.name, "requests": requests, "n": n, "raw": raw}


def _processor_seconds(config: ServerBenchConfig) -> dict[str, float]:
    return processor_seconds(config.server_pid) if config.server_pid else {}


def markdown(record: dict[str, Any]) -> str:
    """Render the record as a table."""
    settings, cases = record["settings"], record["cases"]
    taken = [one["processor_s"] for case in cases for one in case["raw"]]
    names = sorted({name for seconds in taken for name in seconds if seconds[name]})
    each = "".join(f" of `{name}` |" for name in names)
    lines = [
        f"{settings['server_name']}. {settings['server_note']}",
        "",
        f"{settings['max_tokens']} tokens a completion, if the server does what it is asked for. "
        "Tokens a second of the clock; of the processor time of all of the server's processes, "
        "and of each.",
        "",
        f"| burst | requests × n | tokens | tok/s | of all |{each} tokens an event |",
        "|---|---|---|---|---|" + "---|" * (len(names) + 1),
    ]
    for case in cases:
        raw = case["raw"]
        rates = [_rate(raw, names), *(_rate(raw, [name]) for name in names)]
        events = [one["tokens"] / one["events"] for one in raw if one["events"]]
        lines.append(
            f"| {case['name']} | {case['requests']:,} × {case['n']:,} "
            f"| {median(one['tokens'] for one in raw):,.0f} "
            f"| {median(one['tokens'] / one['seconds'] for one in raw):,.0f} "
            f"| {' | '.join(rates)} "
            f"| {f'{median(events):,.1f}' if events else ''} |"
        )
    return "\n".join(lines) + "\n"


def _rate(raw: list[dict[str, Any]], names: list[str]) -> str:
    """Return tokens per second of these processes' time; empty if they took none."""
    seconds = [sum(one["processor_s"].get(name, 0) for name in names) for one in raw]
    if not all(seconds):
        return ""
    return f"{median(one['tokens'] / busy for one, busy in zip(raw, seconds, strict=True)):,.0f}"
