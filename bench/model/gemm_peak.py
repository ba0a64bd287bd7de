"""`python -m bench.model.gemm_peak TASK`: GEMM rates of torch, as JSON.

A second measurement of this machine's peak, for `srm bench`, which gives TASK as JSON: torch's own
linear layer, and on a CPU also oneDNN with weights packed beforehand, which has no bfloat16 on a
processor without AVX512 or similar.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Literal

import msgspec
import torch
from torch import nn
from torch.utils import mkldnn


class Task(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The products to measure, [rows, inner] x [inner, columns]."""

    device: Literal["cpu", "gpu"]
    dtypes: tuple[Literal["float32", "bfloat16"], ...]
    rows: tuple[int, ...]
    shapes: tuple[tuple[int, int], ...]
    repetitions: int


def main(argv: list[str]) -> int:
    """Print a list of {by, dtype, shape [rows, inner, columns], gflops}."""
    task, found = msgspec.json.decode(argv[0], type=Task), []
    on_cpu = task.device == "cpu"
    device = "cpu" if on_cpu else "cuda"
    with torch.inference_mode():
        for dtype in (getattr(torch, name) for name in task.dtypes):
            has_packed = on_cpu and (dtype == torch.float32 or _has_narrow_products())
            for inner, columns in task.shapes:
                plain = nn.Linear(inner, columns, bias=False)
                packed = mkldnn.to_mkldnn(plain, dtype) if has_packed else None  # type: ignore[no-untyped-call]
                layer = plain.to(device, dtype)
                for rows in task.rows:
                    x = torch.randn(rows, inner)
                    products = {"PyTorch linear": _product(layer, x.to(device, dtype))}
                    if packed is not None:
                        products["oneDNN"] = _product(packed, x.to_mkldnn(dtype))
                    for name, run in products.items():
                        seconds = median(_seconds(run, device) for _ in range(task.repetitions))
                        found.append(
                            {
                                "by": name,
                                "dtype": str(dtype).removeprefix("torch."),
                                "shape": [rows, inner, columns],
                                "gflops": 2 * rows * inner * columns / seconds / 1e9,
                            }
                        )
    sys.stdout.write(msgspec.json.encode(found).decode())
    return 0


def _has_narrow_products() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _product(layer: nn.Module, x: torch.Tensor) -> Callable[[], object]:
    return lambda: layer(x)


def _seconds(run: Callable[[], object], device: str) -> float:
    """Return the time of one call, averaged over a loop of at least 0.2 s."""
    run()
    calls, elapsed = 1, 0.0
    while elapsed < 0.2:
        calls *= 2
        _wait(device)
        started = time.perf_counter()
        for _ in range(calls):
            run()
        _wait(device)
        elapsed = time.perf_counter() - started
    return elapsed / calls


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
