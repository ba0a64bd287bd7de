"""`python -m research.bench.gpu.steps TASK`: tokens a second of the engine, sampling at temperature
1.

As `srm bench engine` measures them, but each size is written when it is measured. With `slots` so
many sequences run and take turns, `rows` of them in a step.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

from research.bench.engine.decode import measure_decode, measure_sampler, settings_for
from research.bench.engine.models import BenchConfig
from research.bench.gpu.task import Lines, Task, read_task
from srm.engine.device.runner import ModelRunner
from srm.engine.weights.random_model import random_tensors
from srm.engine.weights.step_bytes import decode_bytes
from srm.engine.weights.weights import fold


def main(argv: list[str]) -> int:
    task = read_task(argv)
    lines, model, config = Lines.from_task(task), task.model, bench_config(task)
    counted = decode_bytes(model, task.dtype, task.device)._asdict()
    facts: dict[str, Any] = {"d_model": model.d_model, "dtype": task.dtype}
    facts |= {"flops_per_token": model.flops_per_token, "bytes": counted}
    runner = open_runner(task)

    def rates(rows: int, top_p: float = 1.0) -> dict[str, Any]:
        running = max(task.slots, rows)
        decode = measure_decode(model, runner, running, config, turn_rows=rows, top_p=top_p)
        return facts | {"top_p": top_p} | decode

    for rows in task.rows:
        lines.attempt(f"{rows} rows", partial(rates, rows))
    most = max(task.rows)
    if not task.slots:
        lines.attempt(f"{most} rows, top-p 0.9", partial(rates, most, 0.9))
        lines.attempt(f"sampler {most}", lambda: measure_sampler(model, runner, most, config))
    runner.close()
    return 0


def bench_config(task: Task) -> BenchConfig:
    return BenchConfig(
        device=task.device,
        dtypes=("bfloat16" if task.dtype == "float8" else task.dtype,),  # peaks are not asked for
        product=task.product,
        repetitions=task.repetitions,
        seconds=task.seconds,
        cache_dir=Path(task.cache_dir),
    )


def open_runner(task: Task) -> ModelRunner:
    """Bind random weights of the task's shape; as many slots as it says, or as rows need."""
    weights = fold(task.model, random_tensors(task.model), "random")
    most, slots = max(task.rows), max(task.slots, *task.rows)
    return ModelRunner(weights, settings_for(bench_config(task), task.dtype, slots, most))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
