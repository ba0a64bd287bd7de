"""Prints what Triton's compiler makes of the kernels for token mixing on sm_90, as JSON."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from srm.training.huggingface import units_triton

TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
TYPES = {"starts": "*fp32", "sums": "*fp32", "decay": "*fp64"}
TYPES |= dict.fromkeys(("length", "heads", "width"), "i32") | {"WIDTH": "constexpr"}


def compiled(kernel: Any, folder: Path) -> dict[str, int]:
    """Of bfloat16, with all scalars, as `units_triton` launches it for wide heads."""
    names = list(kernel.arg_names)
    source = ASTSource(
        kernel,
        {name: TYPES.get(name, "*bf16") for name in names},
        constexprs={(names.index("WIDTH"),): 64},
        attrs={(place,): [["tt.divisibility", 16]] for place in range(len(names) - 1)},
    )
    options = {"num_warps": units_triton.WARPS}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    path = folder / "kernel.cubin"
    path.write_bytes(made.asm["cubin"])
    command = [str(TOOL), "-res-usage", str(path)]
    usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    (registers, stack), *_ = re.findall(r"REG:(\d+) STACK:(\d+)", usage)
    products = made.asm["ptx"].count("wgmma.mma_async")
    return {"registers": int(registers), "stack": int(stack), "products": products}


if __name__ == "__main__":
    kernels = units_triton._forward, units_triton._backward
    print(json.dumps([compiled(kernel, Path(sys.argv[1])) for kernel in kernels]))
