"""`python -m training.gemm_peak REPETITIONS`: GEMM rates of torch, as JSON.

A second opinion on what this machine can do, for `srm bench`: oneDNN with weights packed
beforehand, and torch's own linear layer, in float32 and bfloat16.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from statistics import median

import msgspec
import torch
from torch import nn
from torch.utils import mkldnn

ROWS = (256, 1024, 2048)
SHAPES = ((512, 2048), (1024, 4096))


def main(argv: list[str]) -> int:
    """Print a list of {by, dtype, shape [rows, inner, columns], gflops}."""
    repetitions, found = int(argv[0]), []
    with torch.inference_mode():
        for dtype in (torch.float32, torch.bfloat16):
            for inner, columns in SHAPES:
                plain = nn.Linear(inner, columns, bias=False)
                packed = mkldnn.to_mkldnn(plain, dtype)  # type: ignore[no-untyped-call]
                layer = plain.to(dtype)
                for rows in ROWS:
                    x = torch.randn(rows, inner)
                    products = {
                        "oneDNN": _product(packed, x.to_mkldnn(dtype)),
                        "PyTorch linear": _product(layer, x.to(dtype)),
                    }
                    for name, run in products.items():
                        seconds = median(_seconds(run) for _ in range(repetitions))
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


def _product(layer: nn.Module, x: torch.Tensor) -> Callable[[], object]:
    return lambda: layer(x)


def _seconds(run: Callable[[], object]) -> float:
    run()
    calls, started = 0, time.perf_counter()
    while time.perf_counter() - started < 0.2:
        run()
        calls += 1
    return (time.perf_counter() - started) / calls


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
