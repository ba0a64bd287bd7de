"""`srm bench streams`: what a streamed token costs the API process, the engine and the client.

Servers are whole; their engine computes nothing and sleeps between steps. First nobody is
overloaded, and the client is that of `srm loadtest`. Then tokens come faster and faster, to a
client that only counts events: the most that one API process writes, beside a program that does
nothing else (`bare_streams.py`) in the same run.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from research.bench.frame import Record, Settings, run, table
from research.bench.host.instant import STEP_FILE
from research.bench.host.processes import children_of_server, processes
from research.bench.host.serving import Serving, serving
from research.bench.server.bare_streams import bare_streams, read
from research.bench.server.load import send
from research.bench.server.profile import PARTS, divided, sampled
from srm.engine.config import DEMO_MODEL

_TOKEN_S = 60e-6
"""Seconds a token of the sleeping engine, chosen so that each process should need less than half a
core."""
_LEAST_STEP_S = 0.002
_LEAST_TOKENS = 4_096
"""Least tokens of a burst, as the operating system counts time in hundredths of a second."""


class StreamsBenchConfig(Settings, frozen=True, forbid_unknown_fields=True):
    """Settings of `srm bench streams`."""

    streams: tuple[int, ...] = (1, 16, 256, 1_024, 8_192)
    """Numbers of streams read at once, of one completion each."""
    max_tokens: int = 128
    """Tokens of each completion."""
    logprobs: int = 0
    """Alternatives returned with each token; 0: no log-probabilities."""
    repetitions: int = 3
    """Bursts with each number of streams; the medians are shown."""
    most: int = 1_024
    """Number of streams in the second part, where the engine is fast."""
    token_us: tuple[float, ...] = (40.0, 30.0, 25.0, 20.0)
    """Microseconds in which the fast engine makes a token."""
    profile: bool = False
    """Whether one more burst with each number of streams is sampled by py-spy, to show where the
    time goes."""
    flame: Path | None = None
    """An SVG file for a flame graph of the API process, of the last number of streams."""


def main(argv: list[str]) -> int:
    """Measure, write a record, print its tables."""
    return run(StreamsBenchConfig, argv, "streams", measure, markdown)


def measure(config: StreamsBenchConfig) -> Record:
    """Return one case for each number of streams, and one for each pace of a fast engine."""
    flame = {config.streams[-1]: config.flame} if config.flame and config.streams else {}
    return {
        "cases": [_paced(config, count, flame.get(count)) for count in config.streams],
        "fast": [_fast(config, token_us) for token_us in config.token_us],
    }


@contextmanager
def sleeping_server(streams: int, step_s: float) -> Iterator[Serving]:
    """Start a server with a slot for each stream, and an engine whose steps take so long."""
    with tempfile.TemporaryDirectory() as name:
        model = Path(name) / "model"
        model.mkdir()
        for file in ("config.json", "tokenizer.json"):
            shutil.copy(DEMO_MODEL / file, model)
        (model / STEP_FILE).write_text(str(step_s))
        flags = (f"--model={model}", f"--data-dir={name}/data", "--log-level=warning",
                 f"--num-slots={streams}", f"--max-step-rows={streams}")  # fmt: skip
        with serving(*flags, engine_module="research.bench.host.instant") as server:
            yield server


def _paced(config: StreamsBenchConfig, streams: int, flame: Path | None) -> dict[str, Any]:
    """Measure so many streams of an engine that sleeps."""
    step_s = max(_LEAST_STEP_S, streams * _TOKEN_S)
    requests = max(streams, -(-_LEAST_TOKENS // config.max_tokens))
    fields: dict[str, Any] = {"requests": requests, "concurrency": streams, "stream": True}
    fields |= {"prompt_tokens": "1", "output_tokens": str(config.max_tokens)}
    if config.logprobs:
        fields["extra_body"] = json.dumps({"logprobs": config.logprobs})
    with (
        sleeping_server(streams, step_s) as server,
        tempfile.TemporaryDirectory() as folder,
    ):
        send(server.url, **fields)
        bursts = []
        for seed in range(config.repetitions):
            before = _cpu(server)
            recording = send(server.url, seed=seed, **fields)
            tokens = int(recording.events["tokens"].sum())
            used = _since(before, _cpu(server))
            used["client"] = float(recording.clients["cpu_s"].sum())
            bursts.append(
                {
                    "tokens": tokens,
                    "events": len(recording.events),
                    "seconds": float(np.ptp(recording.events["time"])),
                    "us_a_token": {kind: 1e6 * used[kind] / tokens for kind in KINDS},
                }
            )
        case = {"streams": streams, "step_s": step_s, "bursts": bursts}
        if config.profile:
            stacks = Path(folder) / "stacks"
            with sampled(_api(server), stacks, "raw"):
                send(server.url, **fields)
            case["samples"] = divided(stacks.read_text())
        if flame:
            with sampled(_api(server), flame.absolute(), "flamegraph"):
                send(server.url, **fields)
    return case


def _fast(config: StreamsBenchConfig, token_us: float) -> dict[str, Any]:
    """Measure streams of an engine that gives a token in so much time, and the bare program, in
    turn: both are asked for as many steps, as far apart."""
    streams, bursts, step_s = config.most, [], config.most * token_us / 1e6
    asked = {"model": "model", "prompt": [1], "max_tokens": config.max_tokens}
    body = json.dumps(asked | {"stream": True, "ignore_eos": True}).encode()
    request = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    request += b"content-length: %d\r\n\r\n%b" % (len(body), body)
    with sleeping_server(streams, step_s) as server:
        read(server.port, request, streams)
        for _ in range(config.repetitions):
            before = _cpu(server)
            reading = read(server.port, request, streams)
            used = _since(before, _cpu(server))
            bare, _ = bare_streams(streams, config.max_tokens, step_s)
            bursts.append(
                {
                    "events": reading.events,
                    "events_a_stream": reading.events / streams,
                    "events_per_s": reading.events / reading.seconds,
                    "us_an_event": 1e6 * used["api"] / reading.events,
                    "bare": bare._asdict(),
                }
            )
    return {"streams": streams, "token_us": token_us, "bursts": bursts}


def _cpu(server: Serving) -> defaultdict[str, float]:
    """Return the processor time of each kind of process in seconds, and what the kernel used of the
    API's as `system`."""
    used: defaultdict[str, float] = defaultdict(float)
    table = processes()
    for pid, kind in children_of_server(server.pid, table).items():
        used[kind] += table[pid].cpu_s
        if kind == "api":
            used["system"] += table[pid].system_s
    return used


def _since(before: dict[str, float], now: dict[str, float]) -> dict[str, float]:
    return {kind: seconds - before[kind] for kind, seconds in now.items()}


def _api(server: Serving) -> int:
    kinds = children_of_server(server.pid, processes())
    return next(pid for pid, kind in kinds.items() if kind == "api")


KINDS = ("api", "system", "engine", "client")
"""Processes whose time a token takes; `system` is a part of the API's time."""


def markdown(record: Record) -> list[str]:
    """Render the record as tables."""
    rows, parts = [], []
    for case in record["cases"]:
        bursts = case["bursts"]
        us = {kind: median(burst["us_a_token"][kind] for burst in bursts) for kind in KINDS}
        rate = median(burst["tokens"] / burst["seconds"] for burst in bursts)
        size = median(burst["tokens"] / burst["events"] for burst in bursts)
        cells = " | ".join(f"{us[kind]:.1f}" for kind in KINDS)
        rows.append(f"{case['streams']:,} | {rate:,.0f} | {size:.2f} | {cells}")
        if samples := case.get("samples"):
            total = sum(samples.values())
            cells = " | ".join(f"{us['api'] * samples[part] / total:.1f}" for part in PARTS)
            parts.append(f"{case['streams']:,} | {cells} | {total:,}")
    fast = []
    for case in record["fast"]:
        columns = zip(*map(_cells, case["bursts"]), strict=True)
        rate, size, ours, bare = map(median, columns)
        fast.append(
            f"{1e6 / case['token_us']:,.0f} | {rate:,.0f} | {size:.1f} | {ours:.1f} | {bare:.1f} "
            f"| {ours / bare:.2f} | {1e6 / ours:,.0f}"
        )
    lines = [
        "Processor time of a streamed token in µs; an engine that sleeps. `of these system` is the "
        "kernel's part of the API process.",
        "",
        *table("streams | tok/s | tokens an event | API | of these system | engine | client", rows),
    ]
    if parts:
        lines += ["", "The API's time by what it did, as py-spy saw it in one more burst.", ""]
        lines += table(f"streams | {' | '.join(PARTS)} | samples", parts)
    heads = "engine tok/s | events/s | events a stream | API, µs an event | bare program"
    return [
        *lines,
        "",
        f"{record['settings']['most']:,} streams of a fast engine, read by a program that only "
        "counts events, and the bare program, which writes as many. The last column is what one "
        "core would write.",
        "",
        *table(f"{heads} | ratio | events/s of a core", fast),
    ]


def _cells(burst: Mapping[str, Any]) -> tuple[float, ...]:
    bare_us = burst["bare"]["user_us"] + burst["bare"]["system_us"]
    return burst["events_per_s"], burst["events_a_stream"], burst["us_an_event"], bare_us
