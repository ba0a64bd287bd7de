"""`srm bench replays`: engine steps launched and replayed, in turns.

Both must give the same tokens and log-probabilities to the last bit. With `--variants` steps of
those take turns with them, replayed too: "mixed" and "pdl" must give the same bits. A row of the
table has tokens a second of each, the microseconds of its fastest step, and those that the host
spends on each phase of a step.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import msgspec
import numpy as np

from research.bench.engine.decode import (
    decode_rows,
    endless,
    random_runner,
    random_tokens,
    settings_for,
)
from research.bench.engine.models import StepsConfig
from research.bench.frame import Record, note, random_shape, run, table
from srm.engine.config import ModelConfig
from srm.engine.device.runner import ModelRunner
from srm.engine.process.engine import Engine
from srm.engine.steps.batch import FROM_DEVICE

Ways = dict[str, tuple[ModelRunner, bool]]
"""The runner of each way of stepping, and whether it replays captured steps."""
CHECKED_STEPS = 6
WARM_STEPS = 8


def main(argv: list[str]) -> int:
    """Measure, write a record, print its table."""
    return run(StepsConfig, argv, "replays", measure, markdown)


def measure(config: StepsConfig) -> Record:
    """Return all ways of steps of each width and number of rows."""
    cases = []
    for width in config.random_widths:
        model, dtype = random_shape(width), config.dtypes[0]
        today = msgspec.structs.replace(config, variants=())
        runner = random_runner(model, today, dtype, max(config.rows))
        ways: Ways = {"eager": (runner, False), "replayed": (runner, True)}
        if config.variants:  # opened before a step is captured, which takes all of MAX's memory
            other = random_runner(model, config, dtype, max(config.rows))
            ways["+".join(config.variants)] = other, True
        for rows in config.rows:
            case: Record = {"d_model": width, "rows": rows}
            case |= {"differing": _count_differing(model, ways, rows)}
            cases.append(note(case | _measure(model, ways, rows, config)))
        for opened in {opened for opened, _ in ways.values()}:
            opened.close()
    return {"cases": cases}


def markdown(record: Record) -> list[str]:
    """Render the record as a table."""
    ways = list(record["cases"][0]["raw"])
    heads = ["d", "rows", *(f"differing values, {way}" for way in ways[1:])]
    heads += [f"tok/s {way}" for way in ways] + [f"least µs of a step, {way}" for way in ways]
    heads += [f"µs of the host's phases, {way}" for way in ways]
    return table(
        " | ".join(heads),
        (
            " | ".join(
                [
                    *(str(case["d_model"]), f"{case['rows']:,}"),
                    *(str(case["differing"][way]) for way in ways[1:]),
                    *(f"{case[f'{way}_tokens_per_s']:,.0f}" for way in ways),
                    *(f"{case[f'{way}_least_us']:,.0f}" for way in ways),
                    *(_phases(case[f"{way}_host_us"]) for way in ways),
                ]
            )
            for case in record["cases"]
        ),
    )


def _phases(host_us: dict[str, float]) -> str:
    return ", ".join(f"{name} {us:,.1f}" for name, us in host_us.items())


def _count_differing(model: ModelConfig, ways: Ways, rows: int) -> dict[str, int]:
    """Values of each way that are not those of "eager"."""
    results = {}
    (first,) = random_tokens(model, 1, rows)
    for way, (runner, replays) in ways.items():
        runner.replay_steps(replays)
        fed, parts = first, []
        for position in range(CHECKED_STEPS):
            result = runner.launch(decode_rows(fed, position)).wait()
            parts += [result.token_ids, result.logprobs.view(np.int32)]
            fed = np.full(rows, FROM_DEVICE, np.int32)
        results[way] = np.concatenate(parts)
    return {way: int((results["eager"] != result).sum()) for way, result in results.items()}


def _measure(model: ModelConfig, ways: Ways, rows: int, config: StepsConfig) -> dict[str, Any]:
    raw: dict[str, list[float]] = {way: [] for way in ways}
    phases: dict[str, dict[str, list[float]]] = {way: defaultdict(list) for way in ways}
    least_s = dict.fromkeys(ways, math.inf)
    for repetition in range(config.repetitions):
        for way, (runner, replays) in ways.items():
            runner.replay_steps(replays)
            settings = settings_for(config, config.dtypes[0], rows, rows)
            engine = Engine(model, runner, settings)
            engine.add(endless(model, rows, repetition, 1.0))
            steps_s = _time_steps(engine, config.seconds, phases[way])
            raw[way].append(rows * len(steps_s) / sum(steps_s))
            least_s[way] = min(least_s[way], *steps_s)
    facts: dict[str, Any] = {"raw": raw}
    for way in ways:
        facts[f"{way}_tokens_per_s"] = median(raw[way])
        facts[f"{way}_least_us"] = round(1e6 * least_s[way], 1)
        facts[f"{way}_host_us"] = {
            name: round(1e6 * median(seconds), 1) for name, seconds in phases[way].items()
        }
    return facts


def _time_steps(engine: Engine, least_s: float, phases: dict[str, list[float]]) -> list[float]:
    """Seconds of each step, of at least so many seconds of them."""
    for _ in range(WARM_STEPS):
        engine.step_overlapped()
    steps_s, began = [], time.perf_counter()
    ends = began + least_s
    with timed(engine, phases):
        while engine.has_request("bench") and began < ends:
            engine.step_overlapped()
            steps_s.append((now := time.perf_counter()) - began)
            began = now
    engine.abort("bench")
    while engine.has_work:
        engine.step()
    return steps_s


@contextmanager
def timed(engine: Engine, phases: dict[str, list[float]]) -> Iterator[None]:
    """Add the seconds of each call of these phases meanwhile."""
    owners = {"schedule": engine.scheduler, "complete": engine.scheduler, "launch": engine.runner}

    def clocked(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            result = call(*arguments, **named)
            phases[name].append(time.perf_counter() - began)
            return result

        return run

    for name, owner in owners.items():
        setattr(owner, name, clocked(name, getattr(owner, name)))
    try:
        yield
    finally:
        for name, owner in owners.items():
            delattr(owner, name)
