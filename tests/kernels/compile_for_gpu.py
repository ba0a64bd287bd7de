"""`python -m tests.kernels.compile_for_gpu`: every op compiled for a GPU, on a machine without one.

`engine.precompile` compiles the step graph of one mixer; here is every op in float32.
"""

from __future__ import annotations

from engine.precompile import PrecompileConfig, virtual_gpu
from tests.kernels.harness import Ops

if __name__ == "__main__":
    Ops(virtual_gpu(PrecompileConfig()))
