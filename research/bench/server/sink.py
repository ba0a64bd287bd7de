"""`srm bench sink`: tokens a second that a server streams to clients that cost little.

Those of `srm loadtest` parse every event, and take about as much processor time as the server. The
clients here are a program in C, which `cc` compiles where this runs: it reads, and counts bytes and
events. So the rate is the server's limit. With `compare` each burst is sent by `srm loadtest` too,
in turns.
"""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any, Literal

from research.bench.frame import Record, Settings, note, run, table
from research.bench.host.processes import below, processes
from research.bench.host.serving import Serving, serving
from research.bench.server.http import rate_of
from research.bench.server.load import send
from srm.engine.config import DEMO_MODEL
from srm.errors import ConfigError

SOURCE = Path(__file__).with_suffix(".c")
FLAGS = ("-std=c11", "-D_GNU_SOURCE", "-O2")
SILENT_S = 60.0
"""Seconds without a byte after which a sink gives up."""


class SinkConfig(Settings, frozen=True, forbid_unknown_fields=True):
    """Settings of `srm bench sink`."""

    model: Path = DEMO_MODEL
    """Model folder that is served."""
    device: Literal["cpu", "gpu"] = "cpu"
    """Device of the engine."""
    instant: bool = False
    """Have the engine compute nothing, on no device: the rate is that of all else."""
    streams: tuple[int, ...] = (64, 512, 4_096)
    """Numbers of streams read at once, of one completion each."""
    requests: int = 64
    """Number of requests for many completions, sent at once."""
    n: int = 1_000
    """Completions of each of these requests; 0: they are left out."""
    max_tokens: int = 128
    """Tokens of each completion."""
    api_processes: int = 1
    """Number of API processes."""
    sinks: int = 1
    """Processes of the client, among which connections are divided."""
    repetitions: int = 3
    """Bursts of each kind."""
    compare: bool = False
    """Send each burst by the client of `srm loadtest` too."""


def main(argv: list[str]) -> int:
    """Measure, write a record, print its table."""
    return run(SinkConfig, argv, "sink", measure, markdown)


def measure(config: SinkConfig) -> Record:
    """Return what each burst took of clients and server."""
    flags = [f"--model={config.model.resolve()}", f"--api-processes={config.api_processes}"]
    engine = "research.bench.host.instant" if config.instant else "srm.engine"
    flags += [] if config.instant else [f"--device={config.device}"]
    bursts = [(count, 1) for count in config.streams]
    bursts += [(config.requests, config.n)] if config.n else []
    with compiled() as sink, serving(*flags, engine_module=engine) as server:
        cases = [
            note({"requests": requests, "n": n, "by": by, "raw": raw})
            for requests, n in bursts
            for by, raw in _measure(config, sink, server, requests, n).items()
        ]
    return {"cases": cases}


@contextmanager
def compiled() -> Iterator[Path]:
    """Compile the sink into a folder of its own; yields the program. Raises ConfigError without a
    compiler."""
    if not (compiler := shutil.which("cc")):
        raise ConfigError(
            "`srm bench sink` compiles its client, and there is no cc on this machine"
        )
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "sink"
        command = [compiler, *FLAGS, "-o", str(program), str(SOURCE)]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            raise ConfigError(f"{compiler} does not compile {SOURCE}: {done.stderr.strip()}")
        yield program


def _measure(
    config: SinkConfig, sink: Path, server: Serving, requests: int, n: int
) -> dict[str, list[Record]]:
    asked = {"max_tokens": config.max_tokens, "n": n}
    drain(sink, server, requests, 1, **asked | {"max_tokens": 2})  # to warm up
    clients = ("sink", "loadtest") if config.compare else ("sink",)
    raw: dict[str, list[Record]] = {by: [] for by in clients}
    for _ in range(config.repetitions):
        for by, bursts in raw.items():
            before = api_cpu_s(server.pid)
            if by == "sink":
                burst = drain(sink, server, requests, config.sinks, **asked)
            else:
                burst = _load(server, requests, n, config.max_tokens)
            bursts.append(burst | {"api_cpu_s": api_cpu_s(server.pid) - before})
    return raw


def drain(sink: Path, server: Serving, requests: int, sinks: int, **fields: Any) -> Record:
    """Send a streamed completion over each of so many connections and read all replies. Returns
    tokens, bytes, events and seconds.

    Raises ConfigError unless all replies are whole.
    """
    body = {"prompt": [2] * 32, "stream": True, "ignore_eos": True, **fields}
    body |= {"stream_options": {"include_usage": True}}
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {server.host}\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    sizes = [len(range(first, requests, sinks)) for first in range(min(sinks, requests))]
    with tempfile.NamedTemporaryFile() as file, ExitStack() as stack:
        file.write(head.encode() + content)
        file.flush()
        clients = []
        for size in sizes:
            words = (server.host, server.port, size, SILENT_S, file.name)
            command = [str(sink), *map(str, words)]
            pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
            client = stack.enter_context(subprocess.Popen(command, text=True, **pipes))
            stack.callback(client.kill)
            clients.append(client)
        for client in clients:
            assert client.stdout is not None
            client.stdout.readline()
        for client in clients:
            assert client.stdin is not None
            client.stdin.close()
            client.stdin = None
        outputs = [client.communicate() for client in clients]
    errors = [error for _, error in outputs if error]
    if errors:
        raise ConfigError("".join(errors))
    results = [json.loads(output) for output, _ in outputs]
    total = {name: sum(result[name] for result in results) for name in results[0]}
    total |= {"seconds": max(result["seconds"] for result in results)}
    if total.pop("whole") < requests:
        raise ConfigError(f"{server.url}: not all of {requests} replies were whole")
    return total


def _load(server: Serving, requests: int, n: int, max_tokens: int) -> Record:
    """Send the same by the client of `srm loadtest`."""
    before = _own_cpu_s()
    sizes: dict[str, Any] = {"requests": requests, "concurrency": requests, "prompt_tokens": "32"}
    recording = send(server.url, n=str(n), output_tokens=str(max_tokens), stream=True, **sizes)
    tokens = int(recording.requests["usage_output_tokens"].sum())
    seconds = tokens / rate_of(recording)
    return {"tokens": tokens, "seconds": seconds, "cpu_s": _own_cpu_s() - before}


def _own_cpu_s() -> float:
    kinds = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(used.ru_utime + used.ru_stime for used in kinds)


def api_cpu_s(pid: int) -> float:
    """Return the processor time that a server's API processes have used."""
    everyone = processes()
    own = {number: everyone[number] for number in below(pid, everyone)}
    return sum(
        process.cpu_s
        for number, process in own.items()
        if b"srm.server\0" in Path(f"/proc/{number}/cmdline").read_bytes()
    )


def markdown(record: Record) -> list[str]:
    """Render the record as a table."""
    rows = []
    for case in record["cases"]:
        raw = case["raw"]
        tokens = raw[0]["tokens"]
        rates = [burst["tokens"] / burst["seconds"] for burst in raw]
        api, own = (
            1e6 * min(burst[name] for burst in raw) / tokens for name in ("api_cpu_s", "cpu_s")
        )
        sent = "– | –"
        if "bytes" in raw[0]:
            sizes = [median(burst[name] for burst in raw) for name in ("bytes", "events")]
            sent = f"{sizes[0] / tokens:.0f} | {tokens / sizes[1]:.2f}"
        rows.append(
            f"{case['requests']:,} × {case['n']:,} | {case['by']} | {median(rates):,.0f} "
            f"| {api:.2f} | {own:.2f} | {sent}"
        )
    settings = record["settings"]
    return [
        f"Streams of {settings['max_tokens']} tokens; medians of {settings['repetitions']} bursts, "
        "of processor times the least.",
        "",
        *table(
            "requests × n | client | tok/s | µs of API processes a token | of the client "
            "| bytes a token | tokens an event",
            rows,
        ),
    ]
