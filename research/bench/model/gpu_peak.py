"""`python -m research.bench.model.gpu_peak TASK`: a device's two peaks as torch reaches them, as
lines.

Matrix products in the task's dtype and a copy within the device's memory, so that every later
figure can be read as a fraction of them. TASK is a `research.bench.gpu.task.Task`.
"""

from __future__ import annotations

import sys
from functools import partial
from statistics import median
from typing import Any

import torch

from research.bench.gpu.task import Lines, Task, read_task
from research.bench.peaks.timing import seconds_per_call


def main(argv: list[str]) -> int:
    task = read_task(argv)
    lines = Lines.from_task(task)
    lines.attempt("copy", partial(_copy, task))
    for shape in task.products:
        lines.attempt("×".join(map(str, shape)), partial(_product, task, shape))
    return 0


def _copy(task: Task) -> dict[str, Any]:
    source = torch.empty(int(task.gib * 2**30), dtype=torch.uint8, device=_device(task))
    seconds = _seconds(task, partial(torch.empty_like(source).copy_, source))
    return {"by": "PyTorch", "stream": "copy", "gb_per_s": 2 * source.nbytes / seconds / 1e9}


def _product(task: Task, shape: tuple[int, int, int]) -> dict[str, Any]:
    rows, inner, columns = shape
    dtype, device = getattr(torch, task.dtype), _device(task)
    x = torch.randn(rows, inner, dtype=dtype, device=device)
    weight = torch.randn(inner, columns, dtype=dtype, device=device)
    gflops = 2 * rows * inner * columns / _seconds(task, partial(torch.matmul, x, weight)) / 1e9
    return {"by": "PyTorch", "dtype": task.dtype, "shape": shape, "gflops": gflops}


def _seconds(task: Task, call: Any) -> float:
    wait = torch.cuda.synchronize if task.device == "gpu" else lambda: None
    return median(seconds_per_call(call, wait, task.repetitions, task.seconds))


def _device(task: Task) -> str:
    return "cuda" if task.device == "gpu" else "cpu"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
