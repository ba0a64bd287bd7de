"""What this machine does at best: matrix products by numpy and by PyTorch, plain and packed.

The task: `dtype`, `threads`, `seconds`. Writes a JSON list of {by, dtype, shape, gflops}.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
from torch.utils import mkldnn

from bench.peers.programs.timing import read_task

SHAPES = ((256, 1024, 4096), (2048, 1024, 4096), (256, 512, 2048))
"""Rows, inner, columns: those of a decode step's largest products."""


def main() -> None:
    """Run the task."""
    task = read_task()
    torch.set_num_threads(task["threads"])
    found = []
    with torch.inference_mode():
        for shape in SHAPES:
            for (by, dtype), run in _products(shape, task["dtype"]).items():
                flops = 2 * shape[0] * shape[1] * shape[2]
                gflops = flops / _seconds(run, task["seconds"]) / 1e9
                found.append({"by": by, "dtype": dtype, "shape": shape, "gflops": gflops})
    sys.stdout.write(json.dumps(found))


def _products(
    shape: tuple[int, int, int], narrow: str
) -> dict[tuple[str, str], Callable[[], object]]:
    rows, inner, columns = shape
    x, layer = torch.randn(rows, inner), torch.nn.Linear(inner, columns, bias=False)
    packed: Any = mkldnn.to_mkldnn(layer)  # type: ignore[no-untyped-call]
    weight = layer.weight.numpy().T.copy()
    found: dict[tuple[str, str], Callable[[], object]] = {
        ("numpy", "float32"): partial(np.matmul, x.numpy(), weight),
        ("PyTorch", "float32"): partial(layer, x),
        ("oneDNN, packed", "float32"): partial(packed, x.to_mkldnn()),
    }
    if narrow != "float32":
        dtype = getattr(torch, narrow)
        found["PyTorch", narrow] = partial(
            torch.nn.functional.linear, x.to(dtype), layer.weight.to(dtype)
        )
    return found


def _seconds(run: Callable[[], object], at_least: float) -> float:
    """Median time of a call, of as many as take so long."""
    run()
    taken: list[float] = []
    while sum(taken) < at_least or len(taken) < 3:
        started = time.perf_counter()
        run()
        taken.append(time.perf_counter() - started)
    return median(taken)


if __name__ == "__main__":
    main()
