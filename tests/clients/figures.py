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
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from srm.engine.config import DEMO_MODEL
from tests.clients.conftest import run_client, write_tokenizer
from tests.kit.loads.run_loadtest import loaded
from tests.kit.loads.toy_server import Served


@dataclass(frozen=True)
class Load:
    """So many requests of one shape; `streams` at a time, or `rate` a second."""

    requests: int
    tokens: int
    """Of each reply."""
    prompt: str
    streams: int = 0
    rate: float = 0.0


@dataclass(frozen=True)
class Figures:
    """Means, in seconds, and counts a second. NaN: not told."""

    requests: int
    ttft_s: float
    tpot_s: float
    e2e_s: float
    requests_per_s: float = math.nan
    tokens_per_s: float = math.nan


MEASURES = ("ttft_s", "tpot_s", "e2e_s", "requests_per_s", "tokens_per_s")


def write_prompts(folder: Path, lines: list[dict[str, Any]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def by_srm(folder: Path, url: str, load: Load) -> Figures:
    """As `srm loadtest run` measures it."""
    lines = [{"prompt": load.prompt, "max_tokens": load.tokens}] * load.requests
    how: dict[str, Any] = (
        {"arrivals": "concurrent", "concurrency": load.streams}
        if load.streams
        else {"arrivals": "constant", "rate": load.rate}
    )
    prompts = write_prompts(folder, lines)
    run = loaded(url, **how, requests=load.requests, duration_s=0, prompts=prompts)
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
    folder: Path, url: str, route: str, profile: str, lines: list[dict[str, Any]], **variables: str
) -> dict[str, Any]:
    """Its report on a run with one request for each line; its files are in the folder."""
    write_prompts(folder, lines)
    write_tokenizer(DEMO_MODEL, folder / "tokenizer")
    run_client(
        folder,
        "guidellm",
        *("run", "--backend", f"kind=openai_http,target={url},request_format={route}"),
        *("--profile", profile, "--constraint", f"kind=max_requests,count={len(lines)}"),
        *("--tokenizer", "kind=huggingface_auto,model=tokenizer"),
        *("--data", "kind=json_file,path=prompts.jsonl"),
        *("--output", "kind=json,path=result.json", "--disable-console"),
        **variables,
    )
    (results,) = json.loads((folder / "result.json").read_text())["benchmarks"]
    result: dict[str, Any] = results
    return result


def by_guidellm(folder: Path, url: str, load: Load) -> Figures:
    """As guidellm does, whose Python is that of .venv-clients."""
    lines = [{"prompt": load.prompt, "output_tokens_count": load.tokens}] * load.requests
    closed, steady = f"kind=concurrent,streams={load.streams}", f"kind=constant,rate={load.rate}"
    profile = closed if load.streams else steady
    # One process: it shares two cores with the server, as ours does.
    alone = {"GUIDELLM__MAX_WORKER_PROCESSES": "1"}
    metrics = guidellm(folder, url, "/v1/completions", profile, lines, **alone)["metrics"]
    totals = metrics["request_totals"]
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
    seconds = max(peer.last for peer in served) - min(peer.arrived for peer in served)
    return Figures(
        requests=len(served),
        ttft_s=float(np.mean([peer.first - peer.arrived for peer in served])),
        tpot_s=float(np.mean([(peer.last - peer.first) / (peer.tokens - 1) for peer in served])),
        e2e_s=float(np.mean([peer.last - peer.arrived for peer in served])),
        requests_per_s=len(served) / seconds,
        tokens_per_s=sum(peer.tokens for peer in served) / seconds,
    )


class Histograms:
    """Those of our server's /metrics between two moments: sums and counts are exact."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._before = self._read()

    def _read(self) -> dict[str, float]:
        text = httpx.get(f"{self._url}/metrics", timeout=30).text
        values: defaultdict[str, float] = defaultdict(float)
        for name, value in re.findall(r"^(\w+)(?:\{[^}]*\})? (\S+)$", text, re.MULTILINE):
            values[name] += float(value)
        return values

    def figures(self) -> Figures:
        """Since this was made. Throughput is told by nobody here."""
        now = self._read()

        def grown(name: str) -> float:
            return now[name] - self._before[name]

        def mean(name: str) -> float:
            return grown(f"{name}_sum") / grown(f"{name}_count")

        return Figures(
            requests=int(grown("srm_e2e_request_latency_seconds_count")),
            ttft_s=mean("srm_time_to_first_token_seconds"),
            tpot_s=mean("srm_engine_inter_token_latency_seconds"),
            e2e_s=mean("srm_e2e_request_latency_seconds"),
        )
