"""A device's peak memory bandwidth: streams far larger than its caches, as STREAM counts them.

On a CPU they are numpy's, in a thread per core: copy (b = a) and add (c = a + b), every array read
or written once and counted once, and a read that keeps only the largest value. The line that a
store may fetch first is not counted: this lowers the fractions of ops, not the peak. On a GPU it is
a copy by MAX's driver.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np
from max.driver import Buffer
from max.dtype import DType

from srm.engine.device.runner import open_device

CPU_VALUES = 64 * 2**20
"""float32 values of an array: 256 MiB, several times the largest cache."""
GPU_BYTES = 2**30

Stream = tuple[str, str, int, Callable[[], object]]  # by whom, its name, bytes moved, one run


def measure_memory(kind: str, repetitions: int, values: int = CPU_VALUES) -> list[dict[str, Any]]:
    """Return a list of {by, stream, bytes, gb_per_s, raw} for a "cpu" or a "gpu".

    `gb_per_s` is the best run, as in STREAM, since a limit is wanted; the median is there as well.
    """
    memory = []
    for by, name, moved, run in _cpu_streams(values) if kind == "cpu" else _gpu_streams():
        run()
        raw = [moved / seconds / 1e9 for seconds in (_time(run) for _ in range(repetitions))]
        entry = {"by": by, "stream": name, "bytes": moved, "gb_per_s": max(raw)}
        memory.append(entry | {"median_gb_per_s": median(raw), "raw": raw})
    return memory


def _cpu_streams(values: int) -> list[Stream]:
    cores = len(os.sched_getaffinity(0))
    a, b, c = (np.full(values, 1.5, np.float32) for _ in range(3))
    bounds = np.linspace(0, values, cores + 1).astype(int).tolist()
    parts = [slice(begin, end) for begin, end in pairwise(bounds)]
    threads = ThreadPoolExecutor(cores)  # numpy lets go of the interpreter's lock in all three

    def on_all(work: Callable[[slice], object]) -> Callable[[], object]:
        return lambda: list(threads.map(work, parts))

    return [
        ("numpy", "copy", 2 * a.nbytes, on_all(lambda part: np.copyto(b[part], a[part]))),
        ("numpy", "add", 3 * a.nbytes, on_all(lambda part: np.add(a[part], b[part], out=c[part]))),
        ("numpy", "read", a.nbytes, on_all(lambda part: a[part].max())),
    ]


def _gpu_streams() -> list[Stream]:
    device = open_device("gpu")
    source, target = (Buffer.zeros((GPU_BYTES,), DType.uint8, device=device) for _ in range(2))

    def copy() -> None:
        target.inplace_copy_from(source)
        device.synchronize()

    return [("MAX", "copy", 2 * GPU_BYTES, copy)]


def _time(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started
