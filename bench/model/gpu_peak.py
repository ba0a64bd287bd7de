"""`python3 -m bench.model.gpu_peak`: a GPU's two peaks as torch reaches them.

Measures matrix products in bfloat16 and a copy within its memory, so that every later figure can be
read as a fraction of them. The first part of `deploy/gpu/run.sh`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch

COPY_BYTES = 4 * 2**30
GEMM_SHAPES = ((65_536, 512, 2_048), (65_536, 1_024, 4_096), (8_192, 8_192, 8_192))


def seconds(run: Callable[[], object], repetitions: int = 10) -> float:
    """Return the median time of a run, after three to warm up."""
    times = []
    for repetition in range(repetitions + 3):
        torch.cuda.synchronize()
        started = time.perf_counter()
        run()
        torch.cuda.synchronize()
        if repetition >= 3:
            times.append(time.perf_counter() - started)
    return sorted(times)[len(times) // 2]


def main() -> int:
    if not torch.cuda.is_available():
        sys.stdout.write(f"torch {torch.__version__} sees no GPU\n")
        return 0
    sys.stdout.write(f"torch {torch.__version__}: {torch.cuda.get_device_name()}\n")
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    rate = 2 * COPY_BYTES / seconds(lambda: target.copy_(source))
    sys.stdout.write(f"copy: {rate / 1e12:.2f} TB/s, read and written\n")
    for rows, inner, columns in GEMM_SHAPES:
        x = torch.randn(rows, inner, dtype=torch.bfloat16, device="cuda")
        weight = torch.randn(inner, columns, dtype=torch.bfloat16, device="cuda")
        flops = 2 * rows * inner * columns

        def product(x: torch.Tensor = x, weight: torch.Tensor = weight) -> torch.Tensor:
            return x @ weight

        tera = flops / seconds(product) / 1e12
        sys.stdout.write(f"bfloat16 {rows}x{inner}x{columns}: {tera:.0f} TFLOP/s\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
