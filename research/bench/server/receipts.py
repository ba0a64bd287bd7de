"""`srm bench receipts`: whether receipts of mixed load replay bit for bit, and what that takes."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from research.bench.frame import Record, Settings, note, run, table
from research.bench.host.serving import serving
from srm.engine.config import DEMO_MODEL
from srm.engine.python.replay import Replay, Replayer, read_receipts

_KINDS: dict[str, dict[str, Any]] = {
    "sampled": {"n": 8},
    "greedy, edited": {"temperature": 0, "frequency_penalty": 0.5, "logit_bias": {"9": 3}},
    "narrow, scored": {"n": 4, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "logprobs": 5},
    "penalized": {"n": 4, "presence_penalty": 1, "repetition_penalty": 1.3, "min_tokens": 20},
    "best of": {"n": 4, "best_of": 16, "temperature": 1.5},
    "stop strings": {"n": 8, "stop": ["=", "\n"]},
    "a regex": {"n": 4, "regex": "[a-z ]{3,30}: [0-9]+"},
    "JSON": {"n": 4, "response_format": {"type": "json_object"}},
    "bans": {"n": 4, "bad_words": ["6", "7"], "ignore_eos": True},
}


class ReceiptsConfig(Settings, frozen=True):
    """Settings of srm bench receipts."""

    receipts: int = 10_000
    """Receipts that are replayed, at least."""
    connections: int = 16
    """Concurrent requests."""
    max_tokens: int = 64
    """Most tokens of a completion."""


def measure(config: ReceiptsConfig) -> Record:
    """Return how many receipts of each kind were made and replay, and the seconds of both."""
    drawn, kinds, bodies = random.Random(0), [*_KINDS], []
    count = 0
    while count < config.receipts:
        kind = drawn.choice(kinds)
        a, b = drawn.randrange(2, 99), drawn.randrange(2, 99)
        prompt = (
            f"Question: Ava has {a} boxes with {b} pears each. How many pears is that?\nAnswer:"
        )
        limit = {"max_tokens": drawn.randrange(20, config.max_tokens + 1), "receipt": True}
        bodies.append((kind, {"prompt": prompt, **limit, **_KINDS[kind]}))
        count += _KINDS[kind].get("n", 1)
    with serving(f"--model={DEMO_MODEL}", "--num-slots=512", "--max-step-rows=256") as served:
        http = httpx.Client(base_url=served.url, timeout=600)

        def ask(asked: tuple[str, dict[str, Any]]) -> bytes:
            return http.post("/v1/completions", json=asked[1]).raise_for_status().content

        begun = time.perf_counter()
        with ThreadPoolExecutor(config.connections) as threads:
            replies = list(threads.map(ask, bodies))
        made_s = time.perf_counter() - begun
    begun = time.perf_counter()
    replays = [own for own in read_receipts(replies) if isinstance(own, Replay)]
    replayer = Replayer([DEMO_MODEL])
    replayer.replay(replays, lambda *_: None)
    replayed_s = time.perf_counter() - begun
    replayer.close()
    numbers = {f"line {number}": kind for number, (kind, _) in enumerate(bodies, 1)}
    by_kind = {kind: [0, 0] for kind in kinds}
    for own in replays:
        counts = by_kind[numbers[own.place.partition(",")[0]]]
        counts[0] += 1
        counts[1] += not own.fault
    tokens = sum(own.receipt.num_tokens for own in replays)
    entry = {"asked": count, "made": len(replays), "tokens": tokens, "by_kind": by_kind}
    faults = [f"{own.place}: {own.fault}" for own in replays if own.fault]
    return note(entry | {"made_s": made_s, "replayed_s": replayed_s, "faults": faults[:20]})


def markdown(record: Record) -> list[str]:
    """Return the table of a record."""
    good = sum(counts[1] for counts in record["by_kind"].values())
    return [
        f"{good:,} of {record['made']:,} receipts, of {record['tokens']:,} tokens, replay bit for "
        f"bit. A server made them in {record['made_s']:.1f} s for "
        f"{record['settings']['connections']} connections; the replay took "
        f"{record['replayed_s']:.1f} s, with the start of its engine.",
        "",
        *table(
            "kind | receipts | replay",
            [f"{kind} | {a:,} | {b:,}" for kind, (a, b) in record["by_kind"].items()],
        ),
    ]


def main(argv: list[str]) -> int:
    """Measure, write a record and print its table; return 0."""
    return run(ReceiptsConfig, argv, "receipts", measure, markdown)
