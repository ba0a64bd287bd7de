"""`srm bench states`: what it costs to keep states, to fetch them, and to go on from one elsewhere.

A prompt is read by one server, whose state is put on a second one after the first was stopped. The
time to the first token there stands beside that of the whole prompt, each time with a salt of its
own, so that no kept prompt helps.
"""

from __future__ import annotations

import random
import secrets
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec
import numpy as np

from research.bench.frame import Record, Settings, note, run, table
from research.bench.host.serving import serving
from srm.engine.config import ModelConfig
from srm.engine.state_file import StateContent
from srm.engine.weights.random_model import write_random_model
from srm.errors import ConfigError
from srm.server.storage.states import StateRecord, StateStore, new_state_id


class StatesConfig(Settings, frozen=True):
    """Settings of srm bench states."""

    states: int = 100_000
    """States that are put into a store."""
    state_bytes: int = 16_384
    """Bytes of each."""
    state_tokens: int = 1_000
    """Tokens of each."""
    fetches: int = 20_000
    """States that are fetched of them, at random."""
    width: int = 256
    """Width of the model that is served, with 8 layers and random weights."""
    tokens: int = 20_000
    """Tokens of the prompt."""
    requests: int = 2_000
    """Requests over HTTP of each kind."""
    connections: int = 8
    """Concurrent requests."""
    repetitions: int = 5
    """First tokens that are timed of each kind."""


def measure(config: StatesConfig) -> Record:
    """Return the rates of the store and of HTTP, and times to the first token."""
    with tempfile.TemporaryDirectory() as folder:
        store, ids = _measure_store(Path(folder), config)
        entry = {"store": note(store)}
        return entry | note(_measure_servers(Path(folder), ids, config))


def _measure_store(folder: Path, config: StatesConfig) -> tuple[dict[str, Any], list[str]]:
    """Return what was measured, and the ids of the states that are there."""
    store, ids = StateStore(folder), []
    tokens, state = (
        secrets.token_bytes(4 * config.state_tokens),
        secrets.token_bytes(config.state_bytes),
    )
    content = StateContent(tokens, state)
    digest = content.digest("", "")
    begun = time.perf_counter()
    for _ in range(config.states):
        record = StateRecord(
            id=new_state_id(),
            num_tokens=config.state_tokens,
            num_bytes=content.num_bytes,
            fingerprint="",
            arithmetic="",
            created_at=0,
            expires_at=2**33,
            digest=digest,
        )
        ids.append(store.add(record, content).id)
    add_s = time.perf_counter() - begun
    seconds, cpu_s = [], time.process_time()
    for id in random.Random(0).choices(ids, k=config.fetches):
        begun = time.perf_counter()
        assert store.get(id, "") is not None
        seconds.append(time.perf_counter() - begun)
    cpu_s = time.process_time() - cpu_s
    store.close()
    measured = {
        "content_bytes": len(content.token_ids) + len(content.state),
        "file_bytes": (folder / "states.sqlite3").stat().st_size,
        "added_per_s": config.states / add_s,
        "fetched_per_s": config.fetches / sum(seconds),
        "fetch_cpu_s": cpu_s / config.fetches,
        **_percentiles("fetch", seconds),
    }
    return measured, ids


def _percentiles(name: str, seconds: list[float]) -> dict[str, float]:
    return {f"{name}_p{of}_s": float(np.percentile(seconds, of)) for of in (50, 99)}


def _measure_servers(folder: Path, ids: list[str], config: StatesConfig) -> dict[str, Any]:
    model = ModelConfig(config.width, 8, 4, n_ctx=config.tokens + 256, vocab_size=2048)
    write_random_model(folder / "model", model)
    drawn = random.Random(1)
    prompt = [drawn.randrange(2, 2048) for _ in range(config.tokens)]
    flags = (f"--model={folder / 'model'}", "--max-state-bytes=0", "--max-body-bytes=100000000")
    with serving(*flags, f"--data-dir={folder / 'first'}") as first:
        http = httpx.Client(base_url=first.url, timeout=600)
        state = http.post("/v1/states", json={"prompt": prompt}).raise_for_status().json()
        path = f"/v1/states/{state['id']}/content"
        file = http.get(path).raise_for_status().content
        read = msgspec.json.encode({"prompt": prompt[:100]})
        made = _ask(first.url, config, [("POST", "/v1/states", read)] * config.requests)
    with serving(*flags, f"--data-dir={folder}") as stored:
        drawn_ids = drawn.choices(ids, k=config.requests)
        asked = [("GET", f"/v1/states/{id}/content", b"") for id in drawn_ids]
        fetched = _ask(stored.url, config, asked)
    rates = {
        "created_per_s": made[0],
        "http_fetched_per_s": fetched[0],
        **_percentiles("http_create", made[1]),
        **_percentiles("http_fetch", fetched[1]),
    }
    with serving(*flags, f"--data-dir={folder / 'second'}") as second:
        http = httpx.Client(base_url=second.url, timeout=600)
        begun = time.perf_counter()
        http.put(path, content=file).raise_for_status()
        put_s = time.perf_counter() - begun
        times: dict[str, list[float]] = {"whole": [], "state": []}
        texts = set()
        for number in range(config.repetitions):
            for kind, body in (("whole", {"prompt": prompt}), ("state", {"state": state["id"]})):
                salted = {"cache_salt": f"{kind} {number}", "max_tokens": 1, "temperature": 0}
                begun = time.perf_counter()
                reply = http.post(
                    "/v1/completions", json={**body, **salted, "return_token_ids": True}
                )
                times[kind].append(time.perf_counter() - begun)
                texts.add(str(reply.raise_for_status().json()["choices"][0]["token_ids"]))
    assert len(texts) == 1, "the state gives another token than the whole prompt"
    return {"state_bytes": len(file), "put_s": put_s, "first_token_s": times, **rates}


def _ask(
    url: str, config: StatesConfig, asked: list[tuple[str, str, bytes]]
) -> tuple[float, list[float]]:
    """Return requests a second, of a method, a path and a body each, and the seconds of each.

    By the client of Python's library, which is a part of the time, and a smaller one than httpx.
    """
    address, local = urlsplit(url), threading.local()

    def ask(request: tuple[str, str, bytes]) -> float:
        if not hasattr(local, "connection"):
            local.connection = HTTPConnection(address.hostname or "", address.port)
        begun = time.perf_counter()
        local.connection.request(*request, {"content-type": "application/json"})
        reply = local.connection.getresponse()
        content = reply.read()
        if reply.status != 200:
            raise ConfigError(f"{request[0]} {request[1]}: {content[:300]!r}")
        return time.perf_counter() - begun

    begun = time.perf_counter()
    with ThreadPoolExecutor(config.connections) as threads:
        seconds = list(threads.map(ask, asked))
    return len(asked) / (time.perf_counter() - begun), seconds


def markdown(record: Record) -> list[str]:
    """Return the tables of a record."""
    settings, store, times = record["settings"], record["store"], record["first_token_s"]
    whole, state = median(times["whole"]), median(times["state"])
    return [
        f"{settings['states']:,} states of {store['content_bytes']:,} bytes in one process; the "
        "same over HTTP from one client, which is a part of the time.",
        "",
        *table(
            "what | a second",
            (
                f"added to the store | {store['added_per_s']:,.0f}",
                f"fetched from it, at random | {store['fetched_per_s']:,.0f}",
                f"made of 100 tokens over HTTP | {record['created_per_s']:,.0f}",
                f"fetched over HTTP | {record['http_fetched_per_s']:,.0f}",
            ),
        ),
        "",
        f"A fetch from the store takes {store['fetch_p50_s'] * 1e6:.0f} us (p50) and "
        f"{store['fetch_p99_s'] * 1e6:.0f} us (p99), of which a processor works "
        f"{store['fetch_cpu_s'] * 1e6:.0f} us; over HTTP, {settings['connections']} at a time, "
        f"{record['http_fetch_p50_s'] * 1e3:.1f} ms and {record['http_fetch_p99_s'] * 1e3:.1f} ms. "
        f"The database has {store['file_bytes']:,} bytes.",
        "",
        f"A prompt of {settings['tokens']:,} tokens, random weights of d {settings['width']}; its "
        f"state is a file of {record['state_bytes']:,} bytes, most of them token ids, and is put "
        f"in {record['put_s'] * 1e3:.1f} ms. Both give the same token.",
        "",
        *table(
            "first token on another server | median s",
            (f"of the whole prompt | {whole:.3f}", f"from its state | {state:.4f}"),
        ),
    ]


def main(argv: list[str]) -> int:
    """Measure, write a record and print its tables; return 0."""
    return run(StatesConfig, argv, "states", measure, markdown)
