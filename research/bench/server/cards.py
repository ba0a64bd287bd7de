"""`srm bench cards`: `srm serve` with an engine on each of so many GPUs, under a load for each.

A closed loop of HTTP requests keeps `rows` sequences for each GPU. A row of the table has steps a
second of an engine, how evenly the engines share the rows, and the processor time of engines and
API processes. With `driver`, the GPUs are those of a fake driver, which computes nothing: then only
the processor time and the balance mean something.
"""

from __future__ import annotations

import asyncio
import os
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import httpx

from research.bench.frame import Record, Settings, note, random_shape, run, table
from research.bench.host.processes import below, processes
from research.bench.host.serving import Serving, serving
from srm.engine.config import EngineConfig
from srm.engine.weights.random_model import write_random_model
from srm.loadtest.client import workers
from srm.loadtest.scenario import Scenario

ENGINE, API = "srm.engine", "srm.server api"


class CardsBenchConfig(Settings, frozen=True, forbid_unknown_fields=True):
    """Settings of `srm bench cards`."""

    engines: tuple[int, ...] = (1, 2, 4, 8)
    """Numbers of GPUs of a server; each is measured."""
    random_width: int = 512
    """Value of d_model of the model, whose weights are random."""
    rows: int = 64
    """Sequences that run on each GPU."""
    max_tokens: str = "uniform:32,256"
    """Distribution of the tokens of a sequence, as load tests write it."""
    api_processes: int = 1
    """Number of API processes."""
    seconds: float = 10.0
    """Time that is measured, in seconds, after as long a beginning."""
    cache_dir: Path = EngineConfig().cache_dir
    """Folder of compiled graphs."""
    driver: str = ""
    """Folder of a fake driver's libraries; empty: GPUs of this machine are measured."""
    step_us: int = 8_000
    """Time that a step takes a fake driver's GPU, in microseconds."""

    @property
    def device(self) -> str:
        """Device whose name the record has."""
        return "cpu" if self.driver else "gpu"


class _Sample(NamedTuple):
    """Counts since the server's start."""

    time: float
    steps: dict[str, float]
    """Steps of each engine."""
    tokens: dict[str, float]
    """Tokens that each engine sampled."""
    cpu_s: dict[str, float]
    """Processor time of engines and of API processes."""


def main(argv: list[str]) -> int:
    """Measure, write a record, print its table."""
    return run(CardsBenchConfig, argv, "cards", measure, markdown)


def measure(config: CardsBenchConfig) -> Record:
    """Return rates, balance and processor time of each number of GPUs."""
    cases = []
    with tempfile.TemporaryDirectory() as folder:
        write_random_model(model := Path(folder) / "model", random_shape(config.random_width))
        for count in config.engines:
            flags = (
                *(f"--model={model}", "--device=gpu", "--dtype=bfloat16", f"--engines={count}"),
                *(f"--num-slots={2 * config.rows}", f"--api-processes={config.api_processes}"),
                *(f"--cache-dir={config.cache_dir}", f"--data-dir={folder}/data"),
            )
            with _driver(config, count), serving(*flags) as server:
                for n in (1, max(8, config.rows * count // 4)):
                    cases.append(note(asyncio.run(_case(config, server, count, n))))
    return {"cases": cases}


@contextmanager
def _driver(config: CardsBenchConfig, count: int) -> Iterator[None]:
    """Have the processes started meanwhile find the fake driver, if there is one."""
    before = dict(os.environ)
    if config.driver:
        os.environ["LD_LIBRARY_PATH"] = config.driver
        os.environ["FAKE_CUDA_DEVICES"] = str(count)
        os.environ["FAKE_CUDA_STEP_US"] = str(config.step_us)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


async def _case(config: CardsBenchConfig, server: Serving, count: int, n: int) -> Record:
    scenario = Scenario(
        url=server.url,
        metrics_url="none",
        stream=False,
        concurrency=max(1, config.rows * count // n),
        duration_s=2 * config.seconds,
        output_tokens=config.max_tokens,
        n=str(n),
        seed=n,
    )
    load = asyncio.create_task(workers.run(scenario, lambda _: None, "bench"))
    await asyncio.sleep(config.seconds)
    first = await asyncio.to_thread(_sample, server)
    await asyncio.sleep(config.seconds)
    last = await asyncio.to_thread(_sample, server)
    await load
    seconds = last.time - first.time
    steps = {name: last.steps[name] - first.steps[name] for name in last.steps}
    tokens = {name: last.tokens[name] - first.tokens[name] for name in last.tokens}
    cpu_s = {name: last.cpu_s[name] - first.cpu_s[name] for name in last.cpu_s}
    return {
        "engines": count,
        "n": n,
        "steps_per_s": {name: value / seconds for name, value in steps.items()},
        "tokens_per_s": {name: value / seconds for name, value in tokens.items()},
        "cores": {name: value / seconds for name, value in cpu_s.items()},
        "engine_us_per_step": 1e6 * cpu_s[ENGINE] / sum(steps.values()),
        "engine_us_per_token": 1e6 * cpu_s[ENGINE] / sum(tokens.values()),
        "api_us_per_token": 1e6 * cpu_s[API] / sum(tokens.values()),
    }


def _sample(server: Serving) -> _Sample:
    text = httpx.get(f"{server.url}/metrics", timeout=60).text
    now = time.monotonic()
    steps, tokens = (
        {
            label or "0": float(value)
            for label, value in re.findall(
                rf'^srm_engine_{name}_total(?:{{engine="(\d+)"}})? (\S+)$', text, re.MULTILINE
            )
        }
        for name in ("steps", "decode_tokens")
    )
    table, cpu_s = processes(), {ENGINE: 0.0, API: 0.0}
    for pid in below(server.pid, table):
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        for name in cpu_s:
            if f" -m {name} " in command:
                cpu_s[name] += table[pid].cpu_s
    return _Sample(now, steps, tokens, cpu_s)


def markdown(record: Record) -> list[str]:
    """Render the record as a table."""
    settings = record["settings"]
    device = "GPUs of this machine"
    if settings["driver"]:
        device = (
            f"a **fake driver**, whose GPUs compute nothing for {settings['step_us']:,} µs a step"
        )
    rows = []
    for case in record["cases"]:
        own = case["tokens_per_s"].values()
        rows.append(
            f"{case['engines']} | {case['n']:,} | {mean(case['steps_per_s'].values()):,.1f} | "
            f"{min(own) / mean(own):.3f} … {max(own) / mean(own):.3f} | "
            f"{case['engine_us_per_step']:,.0f} | {case['engine_us_per_token']:,.2f} | "
            f"{case['api_us_per_token']:,.2f} | {sum(case['cores'].values()):.2f}"
        )
    return [
        f"On {device}: {settings['rows']:,} sequences of {settings['max_tokens']} tokens for each "
        f"GPU, d {settings['random_width']}, whole replies, during {settings['seconds']:g} s. "
        "The balance is that of tokens, least and most of an engine by the mean.",
        "",
        *table(
            "GPUs | n | steps/s of an engine | balance | engine, µs of a core a step | a token | "
            "API, µs a token | cores",
            rows,
        ),
    ]
