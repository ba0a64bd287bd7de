"""`srm bench forks`: how many forks a second there are, and what streams lose beside them.

A running stream is forked over HTTP, many samples at once and one after the other; the client that
reads its gaps is a process of its own. Other streams run beside fetches of states, in turns with
streams alone. Clients share the processors with the server, so what streams lose is theirs too.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np

from research.bench.frame import Record, Settings, note, run, table
from research.bench.host.serving import serving
from research.bench.server.http import rate_of
from research.bench.server.load import send
from srm.engine.config import ModelConfig
from srm.engine.messages import SamplingParams
from srm.engine.python.offline import Engine
from srm.engine.weights.random_model import write_random_model
from srm.errors import ConfigError
from srm.loadtest.records import ROOT

CONTEXT = 8_192
AT_ONCE = 10
"""Forks of a stream that are asked for by one request."""
PROMPT = list(range(2, 52))
SMALL = ModelConfig(d_model=64, num_layers=2, num_heads=4, n_ctx=CONTEXT, vocab_size=256)


class ForksConfig(Settings, frozen=True, forbid_unknown_fields=True):
    """Settings of `srm bench forks`."""

    model: Path = ROOT / "models/regex"
    """Checkpoint that is forked beside the small model of random weights."""
    samples: int = 100_000
    """Forks of a state in one process, and of a running stream, of one token each."""
    width: int = 256
    """Width of the model of 8 layers and random weights whose streams are timed."""
    forks: int = 1_000
    """Forks of a stream while it runs, ten of them at once."""
    streams: int = 64
    """Streams beside which states are fetched."""
    fetches_per_s: int = 100
    """States that are fetched a second over HTTP beside them."""
    max_tokens: int = 256
    """Tokens of each of them."""
    repetitions: int = 5
    """Times that each is measured, in turns with what it is compared to."""


def main(argv: list[str]) -> int:
    """Measure, write a record, print its tables."""
    return run(ForksConfig, argv, "forks", measure, markdown)


def measure(config: ForksConfig) -> Record:
    """Return forks a second, gaps of a stream, and tokens a second of streams."""
    with tempfile.TemporaryDirectory() as folder:
        small, wide = Path(folder) / "small", Path(folder) / "wide"
        write_random_model(small, SMALL)
        write_random_model(wide, ModelConfig(config.width, 8, 4, n_ctx=CONTEXT, vocab_size=2_048))
        forks = {
            "small": _fork_states(small, config),
            "model": _fork_states(config.model.resolve(), config),
        }
        sizes = "--num-slots=16384", f"--max-waiting={2 * config.samples}"
        with serving(f"--model={small}", *sizes, f"--data-dir={folder}/a") as server:
            forks["stream"] = _fork_stream(server.url, config)
        entry = note({"forks_per_s": forks})
        with serving(f"--model={wide}", f"--data-dir={folder}/b") as server:
            entry["gaps_s"] = _measure_gaps(server.url, config)
            return entry | note({"tokens_per_s": _measure_beside(server.url, config)})


def _fork_states(model: Path, config: ForksConfig) -> list[float]:
    """Return forks a second of a state in one process."""
    params, rates = SamplingParams(n=config.samples, max_tokens=1), []
    with Engine(model, num_slots=16_384, max_waiting=config.samples) as engine:
        state = engine.state(PROMPT)
        for _ in range(config.repetitions):
            begun = time.perf_counter()
            engine.generate([[]], params, state=state)
            rates.append(config.samples / (time.perf_counter() - begun))
    return rates


def _fork_stream(url: str, config: ForksConfig) -> list[float]:
    """Return forks a second of a stream that runs, of which a reply counts the texts."""
    client, rates = httpx.Client(base_url=url, timeout=600), []
    asked = {"n": config.samples, "max_tokens": 1, "return": "counts"}
    for _ in range(config.repetitions):
        with _stream(url) as (name, read):
            begun = time.perf_counter()
            client.post(f"/v1/completions/{name}/fork", json=asked).raise_for_status()
            rates.append(config.samples / (time.perf_counter() - begun))
            read.result()
    return rates


def _measure_gaps(url: str, config: ForksConfig) -> dict[str, list[list[float]]]:
    """Return the gaps of streams alone and of those that are forked meanwhile."""
    client = httpx.Client(base_url=url, timeout=600)
    gaps: dict[str, list[list[float]]] = {"alone": [], "forked": []}
    for turn in range(2 * config.repetitions):
        with _stream(url) as (name, read):
            if is_forked := bool(turn % 2):
                asked = {"n": AT_ONCE, "max_tokens": 1}
                for number in range(0, config.forks, AT_ONCE):
                    reply = client.post(f"/v1/completions/{name}/fork", json=asked)
                    if reply.is_error:
                        raise ConfigError(f"forks: fork {number} of a stream: {reply.text:.300}")
            gaps["forked" if is_forked else "alone"].append(read.result())
    return gaps


@contextmanager
def _stream(url: str) -> Iterator[tuple[str, Future[list[float]]]]:
    """Begin a stream whose gaps another process reads; yield its id and these."""
    name = f"stream-{time.monotonic_ns()}"
    client = httpx.Client(base_url=url, timeout=600)
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        read = pool.submit(read_gaps, url, name)
        while not read.done():  # it is not there at first
            if client.post(f"/v1/completions/{name}/fork", json={"max_tokens": 1}).is_success:
                break
            time.sleep(0.01)
        yield name, read


def read_gaps(url: str, name: str) -> list[float]:
    """Read a stream as long as the context; return the seconds between its events."""
    body = {"prompt": PROMPT, "ignore_eos": True, "stream": True, "request_id": name}
    body |= {"max_tokens": CONTEXT - len(PROMPT)}
    times = []
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=600) as reply:
        reply.raise_for_status()
        for _ in reply.iter_lines():
            times.append(time.perf_counter())
    return np.diff(times[::2]).tolist()  # every other line is empty


def _measure_beside(url: str, config: ForksConfig) -> dict[str, list[float]]:
    """Return tokens a second of streams alone and beside fetches of a state."""
    client = httpx.Client(base_url=url, timeout=600)
    state = client.post("/v1/states", json={"prompt": PROMPT}).raise_for_status().json()
    path = f"/v1/states/{state['id']}/content"
    rates: dict[str, list[float]] = {"alone": [], "fetched": [], "fetches": []}
    sizes: dict[str, Any] = {"requests": config.streams, "concurrency": config.streams}
    sizes |= {"prompt_tokens": "32", "output_tokens": str(config.max_tokens), "stream": True}
    for seed in range(2 * config.repetitions):
        with ThreadPoolExecutor(1) as thread:
            ended = threading.Event()
            fetching = thread.submit(_fetch, url, path, ended, config) if seed % 2 else None
            try:
                rate = rate_of(send(url, seed=seed // 2, **sizes))
            finally:
                ended.set()
        rates["fetched" if fetching else "alone"].append(rate)
        if fetching:
            rates["fetches"].append(fetching.result())
    return rates


def _fetch(url: str, path: str, ended: threading.Event, config: ForksConfig) -> float:
    """Fetch a state again and again until others have ended; return fetches a second. The client is
    that of Python's library, which costs less than httpx."""
    address = urlsplit(url)
    connection = HTTPConnection(address.hostname or "", address.port)
    begun, fetches = time.perf_counter(), 0
    while not ended.wait(max(0.0, begun + fetches / config.fetches_per_s - time.perf_counter())):
        connection.request("GET", path)
        reply = connection.getresponse()
        if reply.status != 200:
            raise ConfigError(f"forks: a fetch of a state: {reply.read()[:300]!r}")
        reply.read()
        fetches += 1
    return fetches / (time.perf_counter() - begun)


def markdown(record: Record) -> list[str]:
    """Return the tables of a record."""
    settings, gaps, rates = record["settings"], record["gaps_s"], record["tokens_per_s"]
    forks = {
        "of a state in one process, d 64 with 2 layers": record["forks_per_s"]["small"],
        f"of a state in one process, {Path(settings['model']).name}": record["forks_per_s"][
            "model"
        ],
        "of a stream over HTTP, d 64 with 2 layers": record["forks_per_s"]["stream"],
    }
    ratios = [there / alone for there, alone in zip(rates["fetched"], rates["alone"], strict=True)]
    return [
        f"{settings['samples']:,} forks at once, each with its first token. Medians of "
        f"{settings['repetitions']}.",
        "",
        *table("forks | a second", (f"{kind} | {median(own):,.0f}" for kind, own in forks.items())),
        "",
        f"A stream of d {settings['width']} with 8 layers, alone and while {settings['forks']:,} "
        f"forks of it are asked for, {AT_ONCE} at once; all gaps together.",
        "",
        *table(
            "stream | gaps | p50 ms | p99 ms | longest ms",
            (
                f"{kind} | {len(own):,} | "
                + " | ".join(f"{np.percentile(own, at) * 1e3:.2f}" for at in (50, 99, 100))
                for kind, own in ((kind, np.concatenate(each)) for kind, each in gaps.items())
            ),
        ),
        "",
        f"{settings['streams']} streams of that model make {median(rates['alone']):,.0f} tokens a "
        f"second alone, and {median(rates['fetched']):,.0f} beside {median(rates['fetches']):.0f} "
        f"fetches of a state a second over HTTP: {median(ratios):.3f} of it, "
        f"{min(ratios):.3f} … {max(ratios):.3f}.",
    ]
