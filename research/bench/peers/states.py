"""`python -m research.bench.peers states`: what is left of a conversation whose server died.

A server reads a conversation of random ids and hands out what it keeps of it, goes on for some
turns, and is killed. Another one of the same model reads the whole conversation, and goes on from
what was kept, each time with a few tokens more and to the first token.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from secrets import token_hex
from statistics import median
from typing import Any

import httpx

from research.bench.frame import Record, table
from research.bench.host.processes import Watch
from research.bench.host.serving import free_port
from research.bench.peers.config import Peer, PeersConfig
from research.bench.peers.making import make_model
from research.bench.peers.programs.timing import FIRST_TOKEN
from research.bench.peers.running import described, placeholders, started
from research.bench.peers.shapes import VOCAB_SIZE, shape_of
from srm.errors import ConfigError

TURN_TOKENS = 8
"""Tokens that follow the conversation in each request."""
_TIMED = ("save", "restore", "resumed", "again", "all", "alive")


@dataclass
class Keeper:
    """Asks a server for what it keeps of a conversation: ours by `/v1/states`, llama.cpp by its
    slots, whose folder is the one above that of the server, vLLM while it lives."""

    kind: str
    """Kind of the model: srm of our server, mamba2 of llama.cpp, llama of vLLM."""
    http: httpx.Client
    folder: Path
    prompt: list[int]
    state: str = ""

    def call(self, method: str, path: str, **what: Any) -> httpx.Response:
        """Return the answer to a request. Raises ConfigError."""
        answer = self.http.request(method, path, **what)
        if answer.is_error:
            raise ConfigError(f"{method} {path}: {answer.status_code}: {answer.text[:300]}")
        return answer

    def ask(self, turn: list[int], is_new: bool = False) -> Record:
        """Ask for the token after the conversation and a turn; read all anew, if so asked."""
        body: Record = {"prompt": self.prompt + turn, "max_tokens": 1, "temperature": 0}
        if is_new:
            body |= (
                {"cache_prompt": False} if self.kind == "mamba2" else {"cache_salt": token_hex()}
            )
        elif self.state:
            body |= {"prompt": turn or "", "state": self.state}
        answer: Record = self.call("POST", "/v1/completions", json=body).json()
        return answer

    def read(self) -> None:
        """Read the conversation."""
        if self.kind == "srm":
            read = self.call("POST", "/v1/states", json={"prompt": self.prompt})
            self.state = read.json()["id"]
        else:
            self.ask([])

    def save(self) -> int:
        """Save what is kept as a file of the folder; return its bytes."""
        if self.kind == "srm":
            content = self.call("GET", f"/v1/states/{self.state}/content").content
            return (self.folder / "kept").write_bytes(content)
        self.call("POST", "/slots/0?action=save", json={"filename": "kept"})
        return (self.folder / "kept").stat().st_size

    def restore(self) -> None:
        """Take that file."""
        if self.kind == "srm":
            self.state = f"state_{token_hex(16)}"
            content = (self.folder / "kept").read_bytes()
            self.call("PUT", f"/v1/states/{self.state}/content", content=content)
        else:
            self.call("POST", "/slots/0?action=restore", json={"filename": "kept"})


def fed(answer: Record) -> int:
    """Return the prompt's tokens that a completion did not find in a cache."""
    if "timings" in answer:  # of llama.cpp
        return int(answer["timings"]["prompt_n"])
    usage = answer["usage"]
    details = usage.get("prompt_tokens_details") or {}
    return int(usage["prompt_tokens"] - (details.get("cached_tokens") or 0))


def measure(peer: Peer, config: PeersConfig) -> Record:
    """Return a peer's bytes, seconds and fed tokens. Raises ConfigError."""
    values, rng = placeholders(peer, config, make_model(peer, config.folder)), random.Random(0)
    kind = shape_of(peer.model).kind
    folder, keeps = config.results / peer.name, kind != "llama"
    shutil.rmtree(folder, ignore_errors=True)
    prompt, *turns = (
        [rng.randrange(FIRST_TOKEN, VOCAB_SIZE) for _ in range(count)]
        for count in (config.state_tokens, *config.repetitions * (TURN_TOKENS,))
    )
    seconds, tokens, texts, windows = defaultdict(list), defaultdict(list), defaultdict(list), []

    @contextmanager
    def running(name: str) -> Iterator[tuple[Keeper, int]]:
        port = str(free_port())
        url = f"http://127.0.0.1:{port}"
        with (
            started(peer, config, values | {"port": port}, folder / name) as process,
            httpx.Client(base_url=url, timeout=config.timeout_s) as http,
        ):
            began = time.monotonic()
            yield Keeper(kind, http, folder, prompt), process.pid
            windows.append((began, time.monotonic()))

    def timed(what: str, act: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = act()
        seconds[what].append(time.perf_counter() - began)
        return result

    def ask(what: str, keeper: Keeper, turn: list[int], is_new: bool = False) -> None:
        answer = timed(what, lambda: keeper.ask(turn, is_new))
        tokens[what].append(fed(answer))
        texts[what].append(answer["choices"][0]["text"])

    with Watch() as watch:
        with running("first") as (keeper, pid):
            keeper.read()
            sizes = [timed("save", keeper.save) for _ in turns if keeps]
            for number in range(len(turns)):
                ask("alive", keeper, [*chain(*turns[: number + 1])])
            os.killpg(pid, signal.SIGKILL)
        with running("second") as (keeper, _):
            for turn in turns:
                for what, more in (("resumed", turn), ("again", [])):
                    if keeps:
                        timed("restore", keeper.restore)
                    if keeps or not texts["resumed"]:  # others find what it left
                        ask(what, keeper, more)
                ask("all", keeper, turn, is_new=True)
    return described(peer, config, values) | {
        "file_bytes": max(sizes, default=0),
        "seconds": seconds,
        "fed": tokens,
        "same": sum(map(str.__eq__, texts["resumed"], texts["all"])),
        "foreign_cpus": [watch.foreign_cpus(*window) for window in windows],
    }


def markdown(record: Record) -> list[str]:
    """Render the table of a record."""
    settings, rows = record["settings"], []
    for peer in record["results"]:
        times = {kind: f"{median(own):.3g} s" for kind, own in peer["seconds"].items()}
        fed = {kind: f", {median(own):,.0f} fed" for kind, own in peer["fed"].items()}
        cells = (times.get(kind, "–") + fed.get(kind, "") for kind in _TIMED)
        rows.append(
            f"{peer['engine']}, {peer['version']} | {peer['model']}, {peer['dtype']} "
            f"| {peer['flops_per_token'] / 1e6:.1f} | {peer['state_bytes']:,} "
            f"| {peer['file_bytes']:,} | {' | '.join(cells)} "
            f"| {peer['same']} of {len(peer['seconds']['resumed'])}"
        )
    foreign = max(part or 0.0 for peer in record["results"] for part in peer["foreign_cpus"])
    return [
        f"A conversation of {settings['state_tokens']:,} random tokens, and {TURN_TOKENS} more in "
        f"each request, which makes one token: medians of {settings['repetitions']}. Its server is "
        "killed, and another one goes on from what was saved, or reads all again. In the server "
        f"that lives, each request goes on from the one before. Bytes in memory are "
        f"computed. Other programs used at most {foreign:.2f} CPUs meanwhile.",
        "",
        *table(
            "engine | model | MFLOP a token | bytes in memory | bytes left | saved | restored "
            f"| then {TURN_TOKENS} more tokens | then no more | whole prompt | living server "
            "| same token",
            rows,
        ),
    ]
