"""`python -m research.bench.gpu.probe TASK`: what MAX's driver does here that the runner takes for
granted.

Opening the device, its statistics of memory before and after a buffer, a buffer of zero bytes, when
a call returns and when its work is done, copies from memory that is pinned and that is not, and a
start of the engine.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from max.driver import Buffer, Device, Usage, accelerator_count
from max.dtype import DType

from research.bench.engine.decode import decode_rows, random_tokens, seconds_per_step
from research.bench.engine.ops import Ops, Variant
from research.bench.gpu.steps import open_runner
from research.bench.gpu.task import Lines, Task, read_task
from srm.engine.device.graph_cache import describe_device
from srm.engine.device.linear import graph_dtype
from srm.engine.device.products import choose_product
from srm.engine.device.runner import open_device

COPIES = (4 * 2**10, 8 * 4_096, 8 * 65_536)
"""Bytes to copy: next to nothing, then the upload of a step of 4,096 rows and of 65,536 rows."""


def main(argv: list[str]) -> int:
    task = read_task(argv)
    lines, started = Lines.from_task(task), time.perf_counter()
    device = open_device(task.device)
    opened = time.perf_counter() - started
    lines.attempt("device", lambda: _device(device) | {"open_s": opened})
    lines.attempt("memory", partial(_memory, device, int(task.gib * 2**30)))
    lines.attempt("zero bytes", partial(_zero_bytes, device))
    for size in (*COPIES, int(task.gib * 2**26)):
        lines.attempt(f"copy of {size} bytes", partial(_copies, device, size, task.repetitions))
    lines.attempt("execute", partial(_execute, device, task))
    lines.attempt("start", partial(_start, device, task))
    return 0


def _device(device: Device) -> dict[str, Any]:
    return {
        "device": describe_device(device),
        "api": device.api,
        "accelerators": accelerator_count(),
        "stats": _stats(device),
    }


def _stats(device: Device) -> dict[str, Any]:
    return {name: value for name, value in device.stats.items() if isinstance(value, int | float)}


def _memory(device: Device, size: int) -> dict[str, Any]:
    before = _stats(device)
    buffer = Buffer.zeros((size,), DType.uint8, device)
    device.synchronize()
    held = _stats(device)
    del buffer
    device.synchronize()
    return {"bytes": size, "before": before, "held": held, "after": _stats(device)}


def _zero_bytes(device: Device) -> dict[str, Any]:
    """Say whether buffers of no bytes can be made, copied and read."""
    made = Buffer.zeros((0,), DType.int32, device).to_numpy()
    sent = Buffer.from_numpy(np.empty((0, 3), np.float32)).to(device).to_numpy()
    return {"ok": made.shape == (0,) and sent.shape == (0, 3)}


def _copies(device: Device, size: int, repetitions: int) -> dict[str, Any]:
    source = np.arange(size, dtype=np.uint8)
    pageable, target = Buffer.from_numpy(source), Buffer.zeros((size,), DType.uint8, device)
    pinned = Buffer(DType.uint8, (size,), device, Usage.STAGING)
    pinned.to_numpy()[:] = source
    facts: dict[str, Any] = {"bytes": size, "is_pinned": pinned.pinned}
    for name, buffer in (("pageable", pageable), ("pinned", pinned)):
        returned, done = _timed(partial(target.inplace_copy_from, buffer), device, repetitions)
        facts |= {f"{name}_returned_s": returned, f"{name}_done_s": done}
    return facts | {"ok": bool((target.to_numpy() == source).all())}


def _execute(device: Device, task: Task) -> dict[str, Any]:
    dtype = graph_dtype(task.dtype)
    by = choose_product(task.product, task.model, dtype, device)
    variant = Variant(task.model, dtype, by, bound=True)
    ops = Ops(variant, device, Path(task.cache_dir), task.ops)
    name, rows = next(name for name in ops.ops if name in ops.weights), max(task.rows)
    returned, done = _timed(ops.prepare(name, rows), device, task.repetitions)
    return {"op": name, "rows": rows, "returned_s": returned, "done_s": done}


def _timed(call: Callable[[], object], device: Device, times: int) -> tuple[float, float]:
    """Return the median seconds until a call returns, and until its work is done."""
    raw = []
    call()
    for _ in range(times):
        device.synchronize()
        started = time.perf_counter()
        call()
        returned = time.perf_counter() - started
        device.synchronize()
        raw.append((returned, time.perf_counter() - started))
    return median(number for number, _ in raw), median(number for _, number in raw)


def _start(device: Device, task: Task) -> dict[str, Any]:
    """Start the engine; what it leaves of the memory, and steps one by one and overlapped."""
    before, started = _stats(device), time.perf_counter()
    runner = open_runner(task)
    facts = {"start_s": time.perf_counter() - started, "before": before, "after": _stats(device)}
    (tokens,) = random_tokens(task.model, 1, max(task.rows))
    batch, alone = decode_rows(tokens, 0), []
    for _ in range(2 + task.repetitions):
        began = time.perf_counter()
        runner.launch(batch).wait()
        alone.append(time.perf_counter() - began)
    ahead = seconds_per_step(runner, batch, task.seconds)
    runner.close()
    facts |= {"rows": len(tokens), "alone_s": median(alone[2:]), "ahead_s": ahead}
    return facts | {"first_s": alone[0], "in_use": _stats(device)}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
