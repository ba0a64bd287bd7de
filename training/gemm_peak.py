"""`python -m training.gemm_peak`: float32 GEMM rate of torch's oneDNN with packed weights, as JSON.

A second opinion on what this machine can do, for `srm bench`.
"""

from __future__ import annotations

import sys
import time
from statistics import median

import msgspec
import torch
from torch import nn
from torch.utils import mkldnn

ROWS = (256, 1024, 2048)
SHAPES = ((512, 2048), (1024, 4096))


def main() -> int:
    """Print a list of {by, shape [rows, inner, columns], gflops}."""
    found = []
    with torch.inference_mode():
        for inner, columns in SHAPES:
            layer = mkldnn.to_mkldnn(nn.Linear(inner, columns, bias=False))  # type: ignore[no-untyped-call]
            for rows in ROWS:
                x = torch.randn(rows, inner).to_mkldnn()
                seconds = median(_seconds(layer, x) for _ in range(5))
                gflops = 2 * rows * inner * columns / seconds / 1e9
                found.append({"by": "oneDNN", "shape": [rows, inner, columns], "gflops": gflops})
    sys.stdout.write(msgspec.json.encode(found).decode())
    return 0


def _seconds(layer: nn.Module, x: torch.Tensor) -> float:
    layer(x)
    calls, started = 0, time.perf_counter()
    while time.perf_counter() - started < 0.2:
        layer(x)
        calls += 1
    return (time.perf_counter() - started) / calls


if __name__ == "__main__":
    sys.exit(main())
