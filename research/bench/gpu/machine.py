"""`python -m research.bench.gpu.machine TASK`: what the machine is, and which programs it has.
No MAX."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from typing import Any

from research.bench.gpu.task import Lines, read_task
from srm.loadtest.records import new_record
from srm.memory import available_memory

PROGRAMS = ("nvidia-smi", "ncu", "nsys", "compute-sanitizer", "nvcc", "cuobjdump")
PACKAGES = ("torch", "triton", "numpy", "safetensors", "tokenizers", "matplotlib", "max")
QUERIED = (
    *("name", "driver_version", "vbios_version", "compute_cap", "memory.total", "memory.used"),
    *("clocks.sm", "clocks.max.sm", "clocks.mem", "clocks.max.mem", "power.draw", "power.limit"),
    *("temperature.gpu", "persistence_mode", "mig.mode.current", "ecc.mode.current"),
)


def main(argv: list[str]) -> int:
    task = read_task(argv)
    Lines.from_task(task).attempt(
        "machine",
        lambda: (
            new_record("deploy/gpu/run.sh", task.device)
            | {
                "cores": len(os.sched_getaffinity(0)),
                "memory_bytes": available_memory(),
                "programs": [name for name in PROGRAMS if shutil.which(name)],
                "packages": [name for name in PACKAGES if importlib.util.find_spec(name)],
            }
            | (_gpu() if task.device == "gpu" else {})
        ),
    )
    return 0


def _gpu() -> dict[str, Any]:
    """Return what the driver says of the first GPU, and whole for who reads it."""
    query = ["nvidia-smi", f"--query-gpu={','.join(QUERIED)}", "--format=csv,noheader"]
    values = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
    whole = subprocess.run(["nvidia-smi"], capture_output=True, text=True, check=True).stdout
    facts = [value.strip() for value in values[0].split(",")]
    return {"gpu": dict(zip(QUERIED, facts, strict=True)), "nvidia_smi": whole}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
