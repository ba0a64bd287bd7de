"""`srm bench fleet`: lines a second of one batch that several servers answer.

Every server is a whole `srm serve` whose engine sleeps a fixed time a step instead of computing, so
that two cores have room for several. One server has the batch and sends lines to the others. What
the rest of the way costs is counted per line: processor time by kind of process, bytes on the
network.
"""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from bench.frame import Record, Settings, run, table
from bench.host.processes import below, busy_s, children_of_server, processes
from bench.host.serving import Serving, serving
from bench.host.sleeping import STEP_FILE, copy_model
from engine.errors import ConfigError
from loadtest.workload.batch_file import BatchClient, BatchOutput, write_lines

_ROUTE = "/v1/completions"
_EVERY_S = 0.5
_WARM_UP_S = 60.0


class FleetBenchConfig(Settings, frozen=True, forbid_unknown_fields=True):
    """Settings of `srm bench fleet`."""

    engines: tuple[int, ...] = (1, 2, 4, 8)
    """Numbers of servers, including the one that has the batch."""
    line_rates: tuple[float, ...] = (100.0, 400.0, 1600.0)
    """Lines a second that one engine alone would answer."""
    running: int = 64
    """Sequences that an engine runs at once."""
    max_tokens: int = 16
    """Tokens of each line."""
    seconds: float = 10.0
    """Seconds that all engines together would take for the batch."""


class _Counts(NamedTuple):
    """Counters at one moment."""

    time: float
    lines: float
    cpu_s: defaultdict[str, float]
    """Processor time by kind of process; the owner's own begin with `owner`."""
    network_bytes: int
    """Bytes that the loopback interface has sent."""
    foreign_s: float
    """Processor time of everything else on the machine."""


def main(argv: list[str]) -> int:
    """Measure, write a record, print its table."""
    return run(FleetBenchConfig, argv, "fleet", measure, markdown)


def measure(config: FleetBenchConfig) -> Record:
    """Return one case for each rate and number of servers."""
    with tempfile.TemporaryDirectory() as name:
        model = Path(name) / "sleeping"
        copy_model(model)
        return {
            "cases": [
                _measure(config, model, rate, count)
                for rate in config.line_rates
                for count in config.engines
            ]
        }


def _measure(config: FleetBenchConfig, model: Path, rate: float, count: int) -> dict[str, Any]:
    step_s = config.running / (rate * config.max_tokens)
    (model / STEP_FILE).write_text(str(step_s))
    flags = (
        f"--model={model}",
        f"--num-slots={config.running}",
        f"--max-step-rows={config.running}",
        "--log-level=warning",
    )
    module = "bench.host.sleeping"
    with ExitStack() as opened:
        servers: list[Serving] = []
        for number in range(count):
            data = f"--data-dir={model.parent / f'{rate:g}-{count}-{number}'}"
            others = [f"--batch-workers={','.join(one.url for one in servers)}"] if servers else []
            own = [*others, "--batch-fsync-s=0.1"] if number == count - 1 else []
            servers.append(opened.enter_context(serving(*flags, data, *own, engine_module=module)))
        owner = servers[-1]
        file = model.parent / "lines.jsonl"
        with BatchClient(owner.url) as client:
            _warm_up(client, config, file, owner.url, count)
            counts = _run(client, config, file, servers, int(rate * count * config.seconds))
    first, last = counts
    lines, seconds = last.lines - first.lines, last.time - first.time
    return {
        "engines": count,
        "engine_lines_per_s": rate,
        "step_s": step_s,
        "lines": lines,
        "seconds": seconds,
        "lines_per_s": lines / seconds,
        "network_bytes_per_line": (last.network_bytes - first.network_bytes) / lines,
        "foreign_cores": (last.foreign_s - first.foreign_s) / seconds,
        "cpu_s_per_line": {
            kind: (last.cpu_s[kind] - first.cpu_s[kind]) / lines for kind in sorted(last.cpu_s)
        },
    }


def _warm_up(
    client: BatchClient, config: FleetBenchConfig, file: Path, url: str, count: int
) -> None:
    """Run small batches until the owner sends lines to all others."""
    deadline = time.monotonic() + _WARM_UP_S
    while True:
        write_lines(file, _ROUTE, _bodies(config, count * config.running))
        client.wait(client.start(client.upload(file), _ROUTE), lambda _: None)
        if _metric(url, "srm_batch_workers") == count - 1:
            return
        if time.monotonic() > deadline:
            raise ConfigError(f"{url}: does not send lines to {count - 1} other servers")


def _run(
    client: BatchClient, config: FleetBenchConfig, file: Path, servers: list[Serving], lines: int
) -> tuple[_Counts, _Counts]:
    """Run the batch; return what was counted once a fifth and four fifths of it had ended. Raises
    ConfigError unless each line has one result."""
    write_lines(file, _ROUTE, _bodies(config, lines))
    before = _metric(servers[-1].url, "srm_batch_lines_total")
    batch = client.start(client.upload(file), _ROUTE)
    counts: list[_Counts] = []
    while not counts or counts[-1].lines - before < 0.8 * lines:
        time.sleep(_EVERY_S)
        now = _count(servers)
        if now.lines - before >= 0.2 * lines:
            counts.append(now)
    ended = client.wait(batch, lambda _: None)
    output = BatchOutput()
    client.read(ended["output_file_id"], output)
    if (output.lines, output.output_tokens) != (lines, lines * config.max_tokens):
        raise ConfigError(f"{lines} lines have {output}")
    return counts[0], counts[-1]


def _bodies(config: FleetBenchConfig, count: int) -> list[dict[str, Any]]:
    fields = {"max_tokens": config.max_tokens, "ignore_eos": True}
    return [
        {"prompt": f"Question: what is {number} + 1?\nAnswer:", **fields} for number in range(count)
    ]


def _count(servers: list[Serving]) -> _Counts:
    lines, found = _metric(servers[-1].url, "srm_batch_lines_total"), processes()
    foreign_s = busy_s() - sum(found[pid].cpu_s for pid in below(os.getpid(), found))
    cpu_s: defaultdict[str, float] = defaultdict(float)
    for server in servers:
        who = "owner" if server is servers[-1] else "others"
        for pid, kind in children_of_server(server.pid, found).items():
            cpu_s[f"{who} {kind}"] += found[pid].cpu_s
    return _Counts(time.monotonic(), lines, cpu_s, _network_bytes(), foreign_s)


def _network_bytes() -> int:
    (line,) = re.findall(r"^ *lo:(.*)$", Path("/proc/net/dev").read_text(), re.M)
    return int(line.split()[8])


def _metric(url: str, name: str) -> float:
    """Return the sum of a metric's samples."""
    text = httpx.get(f"{url}/metrics", timeout=60, trust_env=False).text
    samples = re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", text, re.M)
    return sum(map(float, samples))


def markdown(record: Record) -> list[str]:
    """Render the record as a table."""
    settings, rows = record["settings"], []
    for case in record["cases"]:
        cpu = {kind: seconds * 1e6 for kind, seconds in case["cpu_s_per_line"].items()}
        wanted = case["engines"] * case["engine_lines_per_s"]
        busy = case["lines_per_s"] * sum(cpu.values()) / 1e6
        cells = (f"{cpu[kind]:,.0f} µs" if kind in cpu else "–" for kind in KINDS)
        rows.append(
            f"{case['engine_lines_per_s']:,.0f} | {case['engines']} | {case['lines_per_s']:,.0f} "
            f"| {case['lines_per_s'] / wanted:.0%} | {' | '.join(cells)} "
            f"| {case['network_bytes_per_line']:,.0f} | {busy:.2f} | {case['foreign_cores']:.2f}"
        )
    return [
        f"Lines of {settings['max_tokens']} tokens, {settings['running']} at once in each engine, "
        "which sleeps; all servers share the machine. Processor time is of a line of the batch, "
        "wherever it ran; bytes are those of the loopback interface, with what the measurement "
        "itself asks.",
        "",
        *table(
            "lines/s of an engine | engines | lines/s | of linear "
            f"| {' | '.join(KINDS)} | bytes a line | cores busy | – by others",
            rows,
        ),
    ]


KINDS = ("owner jobs", "owner engine", "others api", "others engine")
"""Kinds of processes whose time a line takes."""
