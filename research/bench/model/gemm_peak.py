"""`python -m research.bench.model.gemm_peak TASK`: GEMM rates of torch, as JSON.

A second measurement of this machine's peak, for benchmarks, which give TASK as JSON: torch's own
linear layer, and on a CPU also oneDNN with weights packed beforehand, which has no bfloat16 on a
processor without AVX512 or similar.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Literal

import msgspec
import torch
from torch import nn
from torch.utils import mkldnn

from research.bench.peaks.timing import seconds_per_call


class GemmTask(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The products to measure, [rows, inner] x [inner, columns]."""

    device: Literal["cpu", "gpu"]
    dtypes: tuple[Literal["float32", "bfloat16"], ...]
    rows: tuple[int, ...]
    shapes: tuple[tuple[int, int], ...]
    repetitions: int
    threads: int = 0
    """CPU threads; 0: torch chooses."""


def main(argv: list[str]) -> int:
    """Print a list of {by, dtype, shape [rows, inner, columns], gflops}."""
    task, results = msgspec.json.decode(argv[0], type=GemmTask), []
    if task.threads:
        torch.set_num_threads(task.threads)
    wait = torch.cuda.synchronize if task.device == "gpu" else lambda: None
    with torch.inference_mode():
        for by, dtype, shape, call in _products(task):
            rows, inner, columns = shape
            seconds = median(seconds_per_call(call, wait, task.repetitions, 0.2))
            gflops = 2 * rows * inner * columns / seconds / 1e9
            results.append({"by": by, "dtype": dtype, "shape": shape, "gflops": gflops})
    sys.stdout.write(msgspec.json.encode(results).decode())
    return 0


def _products(
    task: GemmTask,
) -> Iterator[tuple[str, str, tuple[int, int, int], Callable[[], object]]]:
    """Yield by whom, dtype, shape and one call of each product."""
    device = "cpu" if task.device == "cpu" else "cuda"
    for name in task.dtypes:
        dtype = getattr(torch, name)
        is_packed = device == "cpu" and (name == "float32" or _has_narrow_products())
        for inner, columns in task.shapes:
            plain = nn.Linear(inner, columns, bias=False)
            packed = mkldnn.to_mkldnn(plain, dtype) if is_packed else None  # type: ignore[no-untyped-call]
            layer = plain.to(device, dtype)
            for rows in task.rows:
                x, shape = torch.randn(rows, inner), (rows, inner, columns)
                yield "PyTorch linear", name, shape, partial(layer, x.to(device, dtype))
                if packed is not None:
                    yield "oneDNN", name, shape, partial(packed, x.to_mkldnn(dtype))


def _has_narrow_products() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
