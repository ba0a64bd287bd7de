"""`python -m research.bench.host.replays TASK`: engine steps launched and replayed, in turns.

Both must give the same tokens and log-probabilities to the last bit. A line has tokens a second of
each, and the microseconds that the host spends on each phase of a step.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from research.bench.engine.decode import _endless, decode_rows, random_tokens, settings_for
from research.bench.gpu.steps import bench_config, open_runner
from research.bench.gpu.task import Lines, Task, read_task
from srm.engine.device.runner import ModelRunner
from srm.engine.process.engine import Engine
from srm.engine.steps.batch import FROM_DEVICE

WAYS = {"eager": False, "replayed": True}
CHECKED_STEPS = 6
WARM_STEPS = 8


def main(argv: list[str]) -> int:
    task = read_task(argv)
    lines, runner = Lines.from_task(task), open_runner(task)
    known = {"d_model": task.d_model, "dtype": task.dtype}
    for rows in task.rows:
        lines.attempt(f"{rows} rows agree", partial(_compare, task, runner, rows), **known)
        lines.attempt(f"{rows} rows", partial(_measure, task, runner, rows), **known)
    runner.close()
    return 0


def _compare(task: Task, runner: ModelRunner, rows: int) -> dict[str, Any]:
    results = {}
    (first,) = random_tokens(task.model, 1, rows)
    for way, replays in WAYS.items():
        runner.replay_steps(replays)
        fed, parts = first, []
        for position in range(CHECKED_STEPS):
            result = runner.launch(decode_rows(fed, position)).wait()
            parts += [result.token_ids, result.logprobs.view(np.int32)]
            fed = np.full(rows, FROM_DEVICE, np.int32)
        results[way] = np.concatenate(parts)
    differing = int((results["eager"] != results["replayed"]).sum())
    return {"rows": rows, "differing": differing, "ok": not differing}


def _measure(task: Task, runner: ModelRunner, rows: int) -> dict[str, Any]:
    raw: dict[str, list[float]] = {way: [] for way in WAYS}
    phases: dict[str, dict[str, list[float]]] = {way: defaultdict(list) for way in WAYS}
    for repetition in range(task.repetitions):
        for way, replays in WAYS.items():
            runner.replay_steps(replays)
            raw[way].append(_rate(task, runner, rows, repetition, phases[way]))
    facts: dict[str, Any] = {"rows": rows, "raw": raw}
    for way in WAYS:
        facts[f"{way}_tokens_per_s"] = median(raw[way])
        facts[f"{way}_host_us"] = {
            name: round(1e6 * median(taken), 1) for name, taken in phases[way].items()
        }
    return facts


def _rate(
    task: Task, runner: ModelRunner, rows: int, seed: int, phases: dict[str, list[float]]
) -> float:
    engine = Engine(task.model, runner, settings_for(bench_config(task), "bfloat16", rows, rows))
    engine.add(_endless(task.model, rows, seed, 1.0))
    for _ in range(WARM_STEPS):
        engine.step_overlapped()
    steps, started = 0, time.perf_counter()
    with timed(engine, phases):
        while engine.has_request("bench") and time.perf_counter() - started < task.seconds:
            engine.step_overlapped()
            steps += 1
    seconds = time.perf_counter() - started
    engine.abort("bench")
    while engine.has_work:
        engine.step()
    return steps * rows / seconds


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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
