"""One load, sent by `srm loadtest` and by guidellm, and what each of them and the server say of it.

guidellm's ITL is our TPOT: the mean over requests of (last token - first) / (tokens - 1). Its TTFT
and its latency begin when a request is sent, so ours from the sending is beside it. Its throughput
counts whole replies from the first request's start to the last one's end; ours does too here,
because the load is a number of requests and nothing is trimmed.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from engine.config import DEMO_MODEL
from tests.clients.conftest import run_client, write_tokenizer
from tests.loads.run_loadtest import loaded
from tests.loads.toy_server import Served


@dataclass(frozen=True)
class Load:
    """So many requests of one shape; `streams` at a time, or `rate` a second."""

    requests: int
    tokens: int
    """Of each reply."""
    prompt: str
    streams: int = 0
    rate: float = 0.0

    def __str__(self) -> str:
        how = f"{self.streams} streams" if self.streams else f"{self.rate:g} requests/s"
        return f"{how}, {self.requests} × {self.tokens} tokens"


@dataclass(frozen=True)
class Figures:
    """Means, in seconds, and counts a second. NaN: not told."""

    requests: int
    ttft_s: float
    tpot_s: float
    e2e_s: float
    requests_per_s: float
    tokens_per_s: float


MEASURES = ("ttft_s", "tpot_s", "e2e_s", "requests_per_s", "tokens_per_s")


def write_prompts(folder: Path, lines: list[dict[str, Any]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def by_srm(folder: Path, url: str, load: Load) -> Figures:
    """As `srm loadtest run` measures it."""
    write_prompts(folder, [{"prompt": load.prompt, "max_tokens": load.tokens}] * load.requests)
    how: dict[str, Any] = (
        {"arrivals": "concurrent", "concurrency": load.streams}
        if load.streams
        else {"arrivals": "constant", "rate": load.rate}
    )
    run = loaded(
        url,
        **how,
        requests=load.requests,
        duration_s=0,
        prompts=folder / "prompts.jsonl",
    )
    summary, requests = run.summary, run.recording.requests
    assert summary.errors == {}, summary.errors
    seconds = float(requests["ended"].max() - requests["sent"].min())
    return Figures(
        requests=summary.completed,
        ttft_s=summary.ttft_sent.mean,
        tpot_s=summary.tpot.mean,
        e2e_s=summary.e2e_sent.mean,
        requests_per_s=summary.completed / seconds,
        tokens_per_s=float(requests["usage_output_tokens"].sum()) / seconds,
    )


def guidellm(
    folder: Path, url: str, route: str, profile: str, count: int, **variables: str
) -> dict[str, Any]:
    """What it says of so many requests of `prompts.jsonl` in the folder, which it runs in."""
    write_tokenizer(DEMO_MODEL, folder / "tokenizer")
    run_client(
        folder,
        "guidellm",
        *("run", "--backend", f"kind=openai_http,target={url},request_format={route}"),
        *("--profile", profile, "--constraint", f"kind=max_requests,count={count}"),
        *("--tokenizer", "kind=huggingface_auto,model=tokenizer"),
        *("--data", "kind=json_file,path=prompts.jsonl"),
        *("--output", "kind=json,path=result.json", "--disable-console"),
        **variables,
    )
    (found,) = json.loads((folder / "result.json").read_text())["benchmarks"]
    result: dict[str, Any] = found
    return result


def by_guidellm(folder: Path, url: str, load: Load) -> Figures:
    """As guidellm does, whose Python is that of .venv-clients."""
    line = {"prompt": load.prompt, "output_tokens_count": load.tokens}
    write_prompts(folder, [line] * load.requests)
    profile = (
        f"kind=concurrent,streams={load.streams}"
        if load.streams
        else f"kind=constant,rate={load.rate}"
    )
    # One process: it shares two cores with the server, as ours does.
    found = guidellm(
        folder, url, "/v1/completions", profile, load.requests, GUIDELLM__MAX_WORKER_PROCESSES="1"
    )
    totals, metrics = found["metrics"]["request_totals"], found["metrics"]
    assert totals["successful"] == totals["total"] == load.requests, totals

    def mean(name: str) -> float:
        return float(metrics[name]["successful"]["mean"])

    return Figures(
        requests=totals["successful"],
        ttft_s=mean("time_to_first_token_ms") / 1e3,
        tpot_s=mean("inter_token_latency_ms") / 1e3,
        e2e_s=mean("request_latency"),
        requests_per_s=mean("requests_per_second"),
        tokens_per_s=mean("output_tokens_per_second"),
    )


def by_toy(served: list[Served]) -> Figures:
    """What the toy server really did."""
    seconds = max(one.last for one in served) - min(one.arrived for one in served)
    return Figures(
        requests=len(served),
        ttft_s=float(np.mean([one.first - one.arrived for one in served])),
        tpot_s=float(np.mean([(one.last - one.first) / (one.tokens - 1) for one in served])),
        e2e_s=float(np.mean([one.last - one.arrived for one in served])),
        requests_per_s=len(served) / seconds,
        tokens_per_s=sum(one.tokens for one in served) / seconds,
    )


class Histograms:
    """Those of our server's /metrics between two moments: sums and counts are exact."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._before = self._read()

    def _read(self) -> dict[str, float]:
        text = httpx.get(f"{self._url}/metrics", timeout=30).text
        found = re.findall(r"^(\w+)(?:\{[^}]*\})? (\S+)$", text, re.MULTILINE)
        values: dict[str, float] = {}
        for name, value in found:
            values[name] = values.get(name, 0.0) + float(value)
        return values

    def figures(self) -> Figures:
        """Since this was made. Throughput is told by nobody here."""
        now = self._read()
        grown = {name: value - self._before.get(name, 0.0) for name, value in now.items()}

        def mean(name: str) -> float:
            return grown[f"{name}_sum"] / grown[f"{name}_count"]

        return Figures(
            requests=int(grown["srm_e2e_request_latency_seconds_count"]),
            ttft_s=mean("srm_time_to_first_token_seconds"),
            tpot_s=mean("srm_engine_inter_token_latency_seconds"),
            e2e_s=mean("srm_e2e_request_latency_seconds"),
            requests_per_s=float("nan"),
            tokens_per_s=float("nan"),
        )


def as_data(figures: Figures) -> dict[str, Any]:
    """For a record; what was not told is left out."""
    return {name: value for name, value in vars(figures).items() if not math.isnan(value)}
