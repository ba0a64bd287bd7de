"""`python -m research.bench.gpu.opening TASK`: opens the GPU as the engine does, or finds out what
helps.

Each rung is a process of its own with other variables, and has a few seconds. The first that opens
the GPU, fills a buffer and reads it back is the last that is tried: its line is `ok` and has the
`environment` of all that follows.
"""

from __future__ import annotations

import subprocess
import sys
import time
from functools import partial
from typing import Any

from research.bench.gpu.task import Lines, Task, read_task

CONTEXT = "MODULAR_DEVICE_CONTEXT"
HEALTH = {f"{CONTEXT}_DISABLE_HEALTHCHECK": "true"}
NO_VMM = HEALTH | {f"{CONTEXT}_MEMORY_MANAGER_VMM": "false"}
LADDER: dict[str, dict[str, str]] = {
    "as it is": {},
    "health check off": HEALTH,
    "virtual memory off": NO_VMM,
    "memory manager off": NO_VMM | {f"{CONTEXT}_MEMORY_MANAGER_SIZE_PERCENT": "0"},
}
"""Variables of MAX by what they turn off."""
RUNG_S = 15.0
OPEN = """
import sys
import numpy as np
from max.driver import Buffer
from max.dtype import DType
from srm.engine.device.graph_cache import describe_device
from srm.engine.device.runner import open_device
device = open_device(sys.argv[1])
sent = np.arange(2**26).astype(np.uint8)
source, buffer = Buffer.from_numpy(sent), Buffer.zeros((2**26,), DType.uint8, device)
buffer.inplace_copy_from(source)
device.synchronize()
assert (buffer.to_numpy() == sent).all(), "a copy came back changed"
print(describe_device(device), dict(device.stats))
"""


def main(argv: list[str]) -> int:
    task = read_task(argv)
    lines = Lines.from_task(task)
    for name, environment in LADDER.items():
        opened: list[bool] = []
        lines.attempt(name, partial(_open, task, environment, opened), environment=environment)
        if any(opened):
            return 0
    return 1


def _open(task: Task, environment: dict[str, str], opened: list[bool]) -> dict[str, Any]:
    variables = [f"{name}={value}" for name, value in environment.items()]
    command = ["env", *variables, sys.executable, "-c", OPEN, task.device]
    started = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=RUNG_S, check=False)
        ok = done.returncode == 0
        output = f"exit {done.returncode}: {(done.stdout + done.stderr)[-2000:]}"
    except subprocess.TimeoutExpired:
        ok, output = False, f"longer than {RUNG_S:.0f} s"
    opened.append(ok)
    return {"ok": ok, "open_s": time.perf_counter() - started, "said": output}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
