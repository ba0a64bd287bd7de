"""`python3 -m bench.model.gpu_peak`: a GPU's two peaks as torch reaches them.

Measures matrix products in bfloat16 and a copy within its memory, so that every later figure can be
read as a fraction of them. The first part of `deploy/gpu/run.sh`.
"""

from __future__ import annotations

import sys
from functools import partial
from statistics import median

import torch

from bench.peaks.timing import seconds_per_call

COPY_BYTES = 4 * 2**30
GEMM_SHAPES = ((65_536, 512, 2_048), (65_536, 1_024, 4_096), (8_192, 8_192, 8_192))


def main() -> int:
    if not torch.cuda.is_available():
        sys.stdout.write(f"torch {torch.__version__} sees no GPU\n")
        return 0
    sys.stdout.write(f"torch {torch.__version__}: {torch.cuda.get_device_name()}\n")
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    copy = partial(torch.empty_like(source).copy_, source)
    rate = 2 * COPY_BYTES / median(seconds_per_call(copy, torch.cuda.synchronize, 10, 0.0))
    sys.stdout.write(f"copy: {rate / 1e12:.2f} TB/s, read and written\n")
    for rows, inner, columns in GEMM_SHAPES:
        x = torch.randn(rows, inner, dtype=torch.bfloat16, device="cuda")
        weight = torch.randn(inner, columns, dtype=torch.bfloat16, device="cuda")
        raw = seconds_per_call(partial(torch.matmul, x, weight), torch.cuda.synchronize, 10, 0.0)
        tera = 2 * rows * inner * columns / median(raw) / 1e12
        sys.stdout.write(f"bfloat16 {rows}x{inner}x{columns}: {tera:.0f} TFLOP/s\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
